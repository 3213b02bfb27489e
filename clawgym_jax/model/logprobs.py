"""Log-probs and entropy of trainable tokens, without tokens x vocabulary in memory.

The state that scores a token stands at `pred`, the token before it on its path. Logits exist for
one chunk of trainable tokens at a time, forward and backward. Not here: which tokens, weights.
Invariant: a chunk's size changes memory, not results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.model.qwen3 import Qwen3, apply_logits


class TokenLogprobs(NamedTuple):
    """Per trainable token; f32[R, K] each (f64 in double precision)."""

    logprobs: jax.Array  # log softmax(logits / temperature)
    raw_logprobs: jax.Array  # at temperature 1
    entropy: jax.Array  # of softmax(logits / temperature)


def token_logprobs(
    graphdef: nnx.GraphDef[Qwen3],
    params: Any,
    hidden: jax.Array,  # f[R, N, D], after the final norm
    pred: jax.Array,  # i32[R, K], where the scoring state stands; any valid index at padding
    target: jax.Array,  # i32[R, K], token ids
    temperature: jax.Array,  # f32[R, K], positive
    chunk: int = 512,
) -> TokenLogprobs:
    """Scores `target` after the states at `pred`."""
    rows, count = target.shape
    size = min(chunk, count)
    chunks = -(-count // size)
    pad = chunks * size - count

    def split(x: jax.Array, fill: float) -> jax.Array:
        """[R, K] -> [chunks, R, size]"""
        padded = jnp.pad(jnp.asarray(x), ((0, 0), (0, pad)), constant_values=fill)
        return padded.reshape(rows, chunks, size).swapaxes(0, 1)

    @jax.checkpoint
    def score(
        params: Any, hidden: jax.Array, at: tuple[jax.Array, jax.Array, jax.Array]
    ) -> TokenLogprobs:
        index, ids, temper = at
        states = jnp.take_along_axis(hidden, index[..., None], axis=1)  # f[R, size, D]
        logits = apply_logits(graphdef, params, states)
        return _score(logits, ids, temper)

    inputs = (split(pred, 0), split(target, 0), split(temperature, 1))
    if chunks == 1:
        scored = score(params, hidden, jax.tree.map(lambda x: x[0], inputs))
        return TokenLogprobs(*scored)
    _, parts = jax.lax.scan(lambda carry, at: (carry, score(params, hidden, at)), None, inputs)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(rows, chunks * size)[:, :count]

    return TokenLogprobs(*(join(part) for part in parts))


def _score(logits: jax.Array, ids: jax.Array, temperature: jax.Array) -> TokenLogprobs:
    """logits f[R, K, V], ids i32[R, K], temperature f32[R, K]"""
    raw = jax.nn.log_softmax(logits, axis=-1)
    scaled = jax.nn.log_softmax(logits / temperature[..., None].astype(logits.dtype), axis=-1)
    at = ids[..., None]
    return TokenLogprobs(
        jnp.take_along_axis(scaled, at, axis=-1)[..., 0],
        jnp.take_along_axis(raw, at, axis=-1)[..., 0],
        -jnp.sum(jnp.exp(scaled) * scaled, axis=-1),
    )

"""One sampled token per slot, with its log-probabilities.

pi = softmax(logits / temperature); top_p, top_k and min_p narrow what can be drawn, never what the
log-probs say. Temperature 0 is greedy, its log-probs those of temperature 1.
Invariant: the draw of a slot depends on its own logits, seed and step only, not on its neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any  # numpy on the way in, traced inside a program


class Draw(NamedTuple):
    ids: jax.Array  # i32[S]
    logprobs: jax.Array  # f32[S], at the slot's temperature
    raw_logprobs: jax.Array  # f32[S], at temperature 1


class Knobs(NamedTuple):
    """Sampling parameters per slot. Off: top_p 1, top_k 0, min_p 0."""

    temperature: Array  # f32[S]
    top_p: Array  # f32[S]
    top_k: Array  # i32[S]
    min_p: Array  # f32[S]
    seed: Array  # u32[S]
    step: Array  # i32[S], index of the token within its completion


def draw(logits: jax.Array, knobs: Knobs) -> Draw:
    """Draws one token per row of logits f32[S, V] by the Gumbel-max rule."""
    raw = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    greedy = knobs.temperature <= 0.0
    temperature = jnp.where(greedy, 1.0, knobs.temperature)
    scaled = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[:, None], axis=-1)
    narrowed = jnp.any((knobs.top_p < 1.0) | (knobs.top_k > 0) | (knobs.min_p > 0.0))
    allowed = jax.lax.cond(narrowed, _narrow, lambda scaled, _: scaled, scaled, knobs)
    noise = jax.vmap(_noise, (0, 0, None))(knobs.seed, knobs.step, logits.shape[-1])
    noisy = jnp.where(greedy[:, None], allowed, allowed + noise)
    ids = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    at = ids[:, None]
    return Draw(
        ids,
        jnp.take_along_axis(scaled, at, axis=-1)[:, 0],
        jnp.take_along_axis(raw, at, axis=-1)[:, 0],
    )


def _noise(seed: jax.Array, step: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise f32[V] of one slot's step."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (vocab,), jnp.float32)


def _narrow(scaled: jax.Array, knobs: Knobs) -> jax.Array:
    """-inf at tokens that top_k, top_p or min_p exclude; the best token always stays."""
    order = jnp.argsort(-scaled, axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)  # f32[S, V], best first
    probabilities = jnp.exp(ranked)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jnp.arange(scaled.shape[-1])[None, :]
    keep = before < knobs.top_p[:, None]
    keep &= (knobs.top_k[:, None] == 0) | (rank < knobs.top_k[:, None])
    keep &= probabilities >= knobs.min_p[:, None] * probabilities[:, :1]
    keep = keep.at[:, 0].set(True)
    rows = jnp.arange(scaled.shape[0])[:, None]
    allowed = jnp.zeros_like(keep).at[rows, order].set(keep)
    return jnp.where(allowed, scaled, -jnp.inf)

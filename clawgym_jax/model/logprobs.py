"""Log-probabilities of chosen tokens without ever holding N x vocabulary scores.

A packed row has K trainable tokens; the logit that scores one comes from the hidden state at
`pred`, the previous token on its path (not the previous token of the array).  Those states are
gathered first, then the output head runs over K in chunks that the backward pass recomputes.

Formulas, with z the logits at pred and T the temperature that the token was sampled at:
    logprob = log softmax(z / T)[target]     raw = log softmax(z)[target]
    entropy = -sum_v p_v log p_v,  p = softmax(z / T)

On a mesh (`axis`) each chip holds some of a row's tokens and of the vocabulary. The states at
`pred` are gathered, every chip scores its own part of the vocabulary, and three sums and a maximum
over the chips make the softmax: all chips get the same numbers. Plain autodiff of that is exact.

Invariant: what comes out at a slot with `pred = -1` (padding) is 0, and so is its gradient.
Not here: losses, masks of trainable tokens, top-p or top-k (refused in training).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clawgym_jax.model import collectives

Head = Callable[[jax.Array], jax.Array]  # f[..., D] -> f32[..., V], or V / X on a mesh


class TokenLogprobs(NamedTuple):
    """All f32[B, K], 0 at padding."""

    logprobs: jax.Array  # under softmax(z / T), the policy that is trained
    raw_logprobs: jax.Array  # under softmax(z)
    entropy: jax.Array  # of softmax(z / T)


def gather_hidden(hidden: jax.Array, pred: jax.Array, axis: str | None = None) -> jax.Array:
    """f[B, K, D]: the states f[B, N, D] at pred i32[B, K]; zeros where pred is -1.

    With `axis`, hidden is f[B, N / X, D] of this chip and the result is on all of them.
    """
    if axis is not None:
        hidden = collectives.gather(hidden, axis, axis=1)
    taken = jnp.take_along_axis(hidden, jnp.maximum(pred, 0)[..., None], axis=1)
    return jnp.where((pred >= 0)[..., None], taken, 0)


def token_logprobs(
    head: Head,
    hidden: jax.Array,  # f[B, N, D], after the final norm
    pred: jax.Array,  # i32[B, K], -1 at padding
    target: jax.Array,  # i32[B, K]
    temperature: jax.Array,  # f32[B, K], > 0
    chunk: int = 512,
    axis: str | None = None,  # of the mesh, over which tokens and vocabulary are cut
) -> TokenLogprobs:
    """Scores `target` at `pred`; at most B x chunk x V logits exist at a time."""
    if not pred.shape == target.shape == temperature.shape:
        raise ValueError(
            "pred, target, temperature: expected one shape [B, K], got "
            f"{pred.shape}, {target.shape}, {temperature.shape}"
        )
    count = pred.shape[1]
    chunk = max(1, min(chunk, count))
    real = pred >= 0
    states = gather_hidden(hidden, pred, axis)  # f[B, K, D]
    score_logits = _score if axis is None else functools.partial(_score_shared, axis)

    def chunks(x: jax.Array) -> jax.Array:  # [B, K, ...] -> [ceil(K / chunk), B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, -count % chunk)) + ((0, 0),) * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 0, 1)

    @jax.checkpoint
    def score(part: tuple[jax.Array, ...]) -> TokenLogprobs:
        state, *rest = part
        return score_logits(head(state), *rest)

    out = jax.lax.map(score, tuple(chunks(x) for x in (states, real, target, temperature)))
    return TokenLogprobs(*(jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)[:, :count] for x in out))


def _score(
    logits: jax.Array,  # f32[B, C, V]
    real: jax.Array,  # bool[B, C]
    target: jax.Array,  # i32[B, C]
    temperature: jax.Array,  # f32[B, C]
) -> TokenLogprobs:
    heat = jnp.where(real, temperature, 1.0)[..., None].astype(logits.dtype)
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)
    raw = picked[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    log_p = jax.nn.log_softmax(logits / heat, axis=-1)
    chosen = jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return TokenLogprobs(*(jnp.where(real, x, 0) for x in (chosen, raw, entropy)))


def _score_shared(
    axis: str,
    logits: jax.Array,  # f32[B, C, V / X]
    real: jax.Array,  # bool[B, C]
    target: jax.Array,  # i32[B, C]
    temperature: jax.Array,  # f32[B, C]
) -> TokenLogprobs:
    """`_score` with the vocabulary over `axis`; the same on all its chips."""
    heat = jnp.where(real, temperature, 1.0).astype(logits.dtype)
    top = jax.lax.pmax(jnp.max(jax.lax.stop_gradient(logits), axis=-1), axis)

    def total(x: jax.Array) -> jax.Array:  # over the whole vocabulary
        summed: jax.Array = jax.lax.psum(jnp.sum(x, axis=-1), axis)
        return summed

    part = logits.shape[-1]
    index = jnp.arange(part) + jax.lax.axis_index(axis) * part
    picked = total(jnp.where(index == target[..., None], logits, 0))
    raw = picked - top - jnp.log(total(jnp.exp(logits - top[..., None])))
    shifted = (logits - top[..., None]) / heat[..., None]
    log_total = jnp.log(total(jnp.exp(shifted)))
    log_p = shifted - log_total[..., None]
    entropy = -total(jnp.exp(log_p) * log_p)
    chosen = (picked - top) / heat - log_total
    return TokenLogprobs(*(jnp.where(real, x, 0) for x in (chosen, raw, entropy)))

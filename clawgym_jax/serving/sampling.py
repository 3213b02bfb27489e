"""One sampled token per slot, with its log-probabilities.

pi = softmax(logits / temperature); top_p, top_k and min_p narrow what can be drawn, never what the
log-probs say. Temperature 0 is greedy, its log-probs those of temperature 1.
Invariant: the draw of a slot depends on its own logits, seed and step only, not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
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


def draw(logits: jax.Array, knobs: Knobs, active: jax.Array) -> Draw:
    """Draws one token per row of logits f32[S, V] by the Gumbel-max rule.

    What the rows with `active` bool[S] do not ask for is not computed: sorting where none of them
    narrows, random numbers where all are greedy. What the others get is noise.
    """
    logits = logits.astype(jnp.float32)
    greedy = knobs.temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, knobs.temperature)[:, None]
    narrowed = (knobs.top_p < 1.0) | (knobs.top_k > 0) | (knobs.min_p > 0.0)
    allowed = _where(jnp.any(narrowed & active), _narrow, scaled, knobs)
    ids = _first_best(_where(jnp.any(~greedy & active), _add_noise, allowed, knobs))
    return Draw(ids, _logprob(scaled, ids), _logprob(logits, ids))


def _where(
    needed: jax.Array, change: Callable[[jax.Array, Knobs], jax.Array], x: jax.Array, knobs: Knobs
) -> jax.Array:
    out: jax.Array = jax.lax.cond(needed, change, lambda x, _: x, x, knobs)
    return out


def _first_best(x: jax.Array) -> jax.Array:
    """argmax over the last axis, i32[S]: two plain reductions, of which CPUs make vector code."""
    best = jnp.max(x, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x == best, index, x.shape[-1] - 1), axis=-1)


def _logprob(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits)[id] of each row: f32[S]"""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(shifted, ids[:, None], axis=-1)[:, 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))


def _add_noise(scaled: jax.Array, knobs: Knobs) -> jax.Array:
    """As it is in greedy rows."""
    noise = jax.vmap(_noise, (0, 0, None))(knobs.seed, knobs.step, scaled.shape[-1])
    return jnp.where((knobs.temperature <= 0.0)[:, None], scaled, scaled + noise)


def _noise(seed: jax.Array, step: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise f32[V] of one slot's step."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (vocab,), jnp.float32)


def _narrow(scaled: jax.Array, knobs: Knobs) -> jax.Array:
    """-inf at tokens that top_k, top_p or min_p exclude; the best token always stays."""
    order = jnp.argsort(-scaled, axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)  # f32[S, V], best first
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jnp.arange(scaled.shape[-1])[None, :]
    keep = (before < knobs.top_p[:, None]) | (knobs.top_p[:, None] >= 1.0)  # `before` is rounded
    keep &= (knobs.top_k[:, None] == 0) | (rank < knobs.top_k[:, None])
    keep &= probabilities >= knobs.min_p[:, None] * probabilities[:, :1]
    keep = keep.at[:, 0].set(True)
    rows = jnp.arange(scaled.shape[0])[:, None]
    allowed = jnp.zeros_like(keep).at[rows, order].set(keep)
    return jnp.where(allowed, scaled, -jnp.inf)

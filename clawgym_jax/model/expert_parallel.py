"""A mixture of experts whose experts lie on several chips: two forms that give the same numbers.

    all_gather  every chip of the axis sees all tokens, applies its own experts to those that
                chose them, and the results are summed and scattered back. Portable.
    ragged      rows travel to their expert's chip and back (`exchange`). Moves K rows a token
                instead of X; on TPU only, elsewhere with the slow twin of the collective.

Both give the rows of a chip's experts a buffer of fixed size, `buffer` times what an even spread
would need. Rows beyond it are counted and the caller must fail: no token is dropped silently.
The gate weights are applied before the down projection, so that a backward pass that recomputes
needs neither that projection nor the way back again.

Axes: X chips, T tokens of a chip, K experts a token, E experts, G = E / X own experts, D hidden.
Invariant: a token's result does not depend on which tokens are its neighbours.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from clawgym_jax.model import collectives, grouped, moe
from clawgym_jax.model.exchange import exchange, plan
from clawgym_jax.model.remat import worth_keeping

Form = Literal["all_gather", "ragged"]
_ALIGNED, _SMALL = 512, 8  # rows: a buffer is a multiple of the first, a small one of the second


def experts(
    x: jax.Array,  # f[T, D]
    params: moe.Experts,  # this chip's, f[G, D, F] and f[G, F, D]
    weights: jax.Array,  # f32[T, K]
    chosen: jax.Array,  # i32[T, K]
    axis: str,
    form: Form,
    buffer: float,
    kind: grouped.Kind,
    native: bool,
) -> tuple[jax.Array, jax.Array]:
    """f[T, D], and i32[]: how many rows found no room on this chip (0, or the result is wrong)."""
    chips = jax.lax.axis_size(axis)
    room = capacity(x.shape[0], chosen.shape[1], chips, buffer)
    weights = weights.astype(x.dtype)
    if form == "ragged":
        return _ragged(x, params, weights, chosen, axis, room, kind, native)
    return _all_gather(x, params, weights, chosen, axis, room, kind)


def capacity(tokens: int, top_k: int, chips: int, buffer: float) -> int:
    """Rows of a chip's buffer, for `tokens` of its own and `chips` - 1 others."""
    even = tokens * top_k
    wanted = int(even * buffer)
    multiple = _ALIGNED if wanted > 8 * _ALIGNED else _SMALL
    return min(-(-wanted // multiple) * multiple, even * chips)


def _all_gather(
    x: jax.Array,
    params: moe.Experts,
    weights: jax.Array,
    chosen: jax.Array,
    axis: str,
    room: int,
    kind: grouped.Kind,
) -> tuple[jax.Array, jax.Array]:
    x, weights, chosen = (collectives.gather(a, axis, axis=0) for a in (x, weights, chosen))
    first = jax.lax.axis_index(axis) * params.gate.shape[0]
    part, overflow = own_part(x, params, weights, chosen, first, room, kind)
    return collectives.scatter_sum(part, axis, axis=0), overflow


def own_part(
    x: jax.Array,  # f[T, D]
    params: moe.Experts,  # some experts'
    weights: jax.Array,  # f[T, K]
    chosen: jax.Array,  # i32[T, K]
    first: jax.Array,  # i32[], number of the first of them
    room: int,
    kind: grouped.Kind,
) -> tuple[jax.Array, jax.Array]:
    """f[T, D]: what these experts contribute to each token; i32[]: rows beyond `room`."""
    own, top_k = params.gate.shape[0], chosen.shape[1]
    local = chosen.reshape(-1) - first
    here = (local >= 0) & (local < own)
    key = jnp.where(here, local, own)  # i32[X * T * K], others' rows sort behind
    order = _sorted(key)
    wanted = _histogram(key, own)
    stop = jnp.minimum(jnp.cumsum(wanted), room)
    place = jnp.where(here, _sorted(order), room)  # beyond the buffer: not here
    order, place = order[:room], place.reshape(-1, top_k)
    rows = spread(x, order, place)
    scale = spread(weights.reshape(-1, 1), order, place.reshape(-1, 1))
    out = moe.swiglu(rows, params, jnp.diff(stop, prepend=0), scale, kind)
    return collect(out, order, place), jnp.sum(wanted) - stop[-1]


def _ragged(
    x: jax.Array,
    params: moe.Experts,
    weights: jax.Array,
    chosen: jax.Array,
    axis: str,
    room: int,
    kind: grouped.Kind,
    native: bool,
) -> tuple[jax.Array, jax.Array]:
    count = params.gate.shape[0] * jax.lax.axis_size(axis)
    flat = chosen.reshape(-1)
    order = _sorted(flat)  # i32[T * K]
    place = _sorted(order).reshape(chosen.shape)  # the inverse
    counts = jax.lax.all_gather(_histogram(flat, count), axis)  # i32[X, E]
    ways = plan(counts, jax.lax.axis_index(axis), room)
    rows = spread(x, order, place)
    scale = spread(weights.reshape(-1, 1), order, place.reshape(-1, 1))
    rows = exchange(rows, room, ways.there, ways.back, axis, native)
    scale = exchange(scale, room, ways.there, ways.back, axis, native)
    out = moe.swiglu(rows, params, ways.sizes, scale, kind)
    back = exchange(out, flat.shape[0], ways.back, ways.there, axis, native)
    return collect(back, order, place), ways.overflow


def _histogram(values: jax.Array, count: int) -> jax.Array:
    """i32[count]: how often 0 .. count - 1 stand in `values` (no scatter: slow on TPU)."""
    return jnp.sum(values[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)


def _sorted(keys: jax.Array) -> jax.Array:
    """i32[M]: the stable order of `keys`; of a permutation, its inverse."""
    return worth_keeping(jnp.argsort(keys, stable=True).astype(jnp.int32))


@jax.custom_vjp
def spread(
    x: jax.Array,  # f[T, D]
    order: jax.Array,  # i32[M], numbers t * K + k
    place: jax.Array,  # i32[T, K], where t * K + k stands in `order`; M or more: nowhere
) -> jax.Array:
    """f[M, D]: token `order // K` in each row. Its transpose is `collect`: gathers both ways.

    Rows that `place` does not name hold some token; nothing may depend on them.
    """
    return x[order // place.shape[1]]


@jax.custom_vjp
def collect(
    rows: jax.Array,  # f[M, D]
    order: jax.Array,  # i32[M]
    place: jax.Array,  # i32[T, K]
) -> jax.Array:
    """f[T, D]: for each token the sum of its K rows, in at least float32."""
    precise = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((place.shape[0], rows.shape[1]), precise)
    for k in range(place.shape[1]):  # one by one: never T * K rows at a time
        total += rows.at[place[:, k]].get(mode="fill", fill_value=0).astype(precise)
    return total.astype(rows.dtype)


Indices = tuple[jax.Array, jax.Array]


def _spread_forward(x: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, Indices]:
    return spread(x, order, place), (order, place)


def _spread_backward(saved: Indices, upstream: jax.Array) -> tuple[jax.Array, None, None]:
    return collect(upstream, *saved), None, None


def _collect_forward(
    rows: jax.Array, order: jax.Array, place: jax.Array
) -> tuple[jax.Array, Indices]:
    return collect(rows, order, place), (order, place)


def _collect_backward(saved: Indices, upstream: jax.Array) -> tuple[jax.Array, None, None]:
    return spread(upstream, *saved), None, None


spread.defvjp(_spread_forward, _spread_backward)
collect.defvjp(_collect_forward, _collect_backward)

"""Who sends which rows where: the arithmetic of a ragged all-to-all between tokens and experts.

Chip s has its rows sorted by expert; expert e lives on chip e // (E / X). Each pair of source and
expert is one slice, and it lands where the grouped multiplication wants it: a chip's buffer holds
its experts one after another, and within an expert the sources one after another. So nothing is
sorted again on arrival. The way back is the same slices from the same places.

`plan` is pure integer arithmetic on the counts that all chips know. `exchange` moves the rows: by
`jax.lax.ragged_all_to_all` on TPU, and where that does not exist by gathering everything and
picking (the slow twin, same meaning).

Axes: X chips of the axis, E experts, G = E / X own experts.
Invariant: a buffer never overflows silently: slices are cut at its end and the rows that found no
room are counted.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Route(NamedTuple):
    """The arguments of `jax.lax.ragged_all_to_all`, slices of one destination together."""

    input_offsets: jax.Array  # i32[E], where a slice starts here
    send_sizes: jax.Array  # i32[E], its rows
    output_offsets: jax.Array  # i32[E], where it starts on its destination
    receive_sizes: jax.Array  # i32[E], rows of the slices that come in, by source


class Plan(NamedTuple):
    """One chip's part in the exchange."""

    there: Route  # rows to experts; slices by expert
    back: Route  # results to the rows' owners; slices by (owner, own expert)
    sizes: jax.Array  # i32[G], rows received for each own expert
    overflow: jax.Array  # i32[], rows for this chip that found no room


def plan(counts: jax.Array, chip: jax.Array, capacity: int) -> Plan:
    """The plan of `chip`, from `counts` i32[X, E]: how many rows each source has per expert."""
    chips, experts = counts.shape
    own = experts // chips
    arriving = counts.T.reshape(chips, own * chips)  # [chip, (own expert, source)]
    stop = jnp.cumsum(arriving, axis=1)
    start = jnp.minimum(stop - arriving, capacity)
    size = (jnp.minimum(stop, capacity) - start).reshape(experts, chips)
    start = start.reshape(experts, chips)
    offset = jnp.cumsum(counts, axis=1) - counts  # [source, expert]

    def mine(table: jax.Array) -> jax.Array:  # [expert, source] to [(source, own expert)]
        return jax.lax.dynamic_slice_in_dim(table, chip * own, own).T.reshape(-1)

    there = Route(offset[chip], size[:, chip], start[:, chip], mine(size))
    back = Route(mine(start), mine(size), mine(offset.T), size[:, chip])
    sizes = jnp.sum(mine(size).reshape(chips, own), axis=0)
    return Plan(there, back, sizes, jnp.sum(mine(counts.T)) - jnp.sum(sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 4, 5))
def exchange(
    rows: jax.Array,  # f[M, D]
    room: int,
    route: Route,
    back: Route,
    axis: str,
    native: bool,
) -> jax.Array:
    """f[room, D]: what arrives, zeros where nothing does; gradients take the way `back`."""
    if not native:
        return _pick(rows, room, route, axis)
    empty = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    out: jax.Array = jax.lax.ragged_all_to_all(rows, empty, *route, axis_name=axis)
    return out


Saved = tuple[jax.Array, Route, Route]


def _exchange_forward(
    rows: jax.Array, room: int, route: Route, back: Route, axis: str, native: bool
) -> tuple[jax.Array, Saved]:
    shape_only = rows[:, :0]
    return exchange(rows, room, route, back, axis, native), (shape_only, route, back)


def _exchange_backward(
    room: int, axis: str, native: bool, saved: Saved, upstream: jax.Array
) -> tuple[jax.Array, None, None]:
    shape_only, route, back = saved
    return exchange(upstream, len(shape_only), back, route, axis, native), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _pick(rows: jax.Array, room: int, route: Route, axis: str) -> jax.Array:
    """`exchange` by gathering all rows of all chips."""
    own = route.send_sizes.shape[0] // jax.lax.axis_size(axis)
    first = jax.lax.axis_index(axis) * own

    def to_me(values: jax.Array) -> jax.Array:  # i32[X * G, 1], slices that come to this chip
        everyone = jax.lax.all_gather(values, axis)
        return jax.lax.dynamic_slice_in_dim(everyone, first, own, axis=1).reshape(-1, 1)

    source, size, start = (to_me(x) for x in route[:3])
    index = jnp.arange(room, dtype=jnp.int32)
    arrives = (index >= start) & (index < start + size)  # bool[X * G, room]
    piece = jnp.argmax(arrives, axis=0)
    at = source[piece, 0] + index - start[piece, 0]
    everything = jax.lax.all_gather(rows, axis)  # f[X, M, D]
    found = everything[piece // own, jnp.clip(at, 0, rows.shape[0] - 1)]
    return jnp.where(jnp.any(arrives, axis=0)[:, None], found, 0)

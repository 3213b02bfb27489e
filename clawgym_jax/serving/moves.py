"""Programs that copy keys and values: between slots of any rooms, to the pool and back.

Pure functions of the state, for one chip. Not here: what is worth copying (`places`).
Axes: see `state`; T' a bucket, the length up to which is copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clawgym_jax.serving import pieces
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.quantised import Kept, slice_of, with_slice
from clawgym_jax.serving.state import Array, DecodeState


def copy(
    state: DecodeState, source: Array, target: Array, source_room: int, room: int, bucket: int
) -> DecodeState:
    """The first T' keys and values of a slot in another slot."""

    def one(parts: tuple[Cache, ...]) -> tuple[Cache, ...]:
        taken = pieces.take_one(parts[source_room], source, bucket)
        return replaced(parts, room, pieces.put_one(parts[room], taken, target))

    return state._replace(k=one(state.k), v=one(state.v))


def save(
    state: DecodeState, at_slot: Array, first: Array, pages: Array, count: Array, room: int
) -> DecodeState:
    """Copies `count` pages of a slot, from its page `first` on, to `pages` i32[T / page]."""

    def one(pool: Kept, cache: Cache) -> Kept:
        keys, slot = _row(cache, at_slot)
        size = (pool.shape[0], 1, *pool.shape[2:4])

        def page(i: jax.Array, pool: Kept) -> Kept:
            taken = slice_of(keys, (0, slot, 0, (first + i) * size[3]), size)
            return with_slice(pool, taken, (0, pages[i], 0, 0))

        out: Kept = jax.lax.fori_loop(0, count, page, pool)
        return out

    assert state.pool_k is not None and state.pool_v is not None
    return state._replace(
        pool_k=one(state.pool_k, state.k[room]), pool_v=one(state.pool_v, state.v[room])
    )


def restore(
    state: DecodeState, at_slot: Array, pages: Array, count: Array, room: int
) -> DecodeState:
    """Copies `count` pages to the beginning of a slot."""

    def one(cache: Cache, pool: Kept) -> Cache:
        keys, slot = _row(cache, at_slot)
        size = (pool.shape[0], 1, *pool.shape[2:4])

        def page(i: jax.Array, keys: Kept) -> Kept:
            taken = slice_of(pool, (0, pages[i], 0, 0), size)
            return with_slice(keys, taken, (0, slot, 0, i * size[3]))

        out: Kept = jax.lax.fori_loop(0, count, page, keys)
        return ((out,),) if pieces.is_whole(cache) else pieces.put_one(cache, out, at_slot)

    assert state.pool_k is not None and state.pool_v is not None
    return state._replace(
        k=replaced(state.k, room, one(state.k[room], state.pool_k)),
        v=replaced(state.v, room, one(state.v[room], state.pool_v)),
    )


def mend(state: DecodeState) -> DecodeState:
    """With 0 for what is not finite, in all slots and pages."""

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))

    mended: DecodeState = jax.tree.map(one, state)
    return mended


def _row(cache: Cache, slot: Array) -> tuple[Kept, Array]:
    """One piece f[L, S, KV, T, hd] with a slot's keys, and the slot's number in it."""
    if pieces.is_whole(cache):
        return cache[0][0], slot
    return pieces.take_one(cache, slot, pieces.tokens(cache)), 0


def replaced(parts: tuple[Cache, ...], index: int, new: Cache) -> tuple[Cache, ...]:
    """With `new` at `index`."""
    return (*parts[:index], new, *parts[index + 1 :])

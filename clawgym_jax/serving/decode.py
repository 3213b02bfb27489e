"""The engine's decode step, for one chip: a pure function of parameters and state.

A program decodes all slots, or so many rows as it was made for, whichever slots they stand for: few
requests do not pay for empty slots then. Not here: which slots and how many rows (`engine`), what
attention computes (`attention`).
Invariant: what a slot gets depends on its own tokens, seed and step only.
Axes: see `state`; R rows of a step, r those of a room, T' the length up to which attention reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clawgym_jax.model.qwen3 import Qwen3, all_logits, apply
from clawgym_jax.serving import pieces
from clawgym_jax.serving.attention import attend_step, attend_step_by_block
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.programs import Forms
from clawgym_jax.serving.quantised import Kept, slice_of
from clawgym_jax.serving.sampling import Draw, Knobs, draw
from clawgym_jax.serving.state import Array, DecodeState, Room


class _Part(NamedTuple):
    """A room's rows of a step."""

    rows: slice  # of R
    slots: jax.Array | None  # i32[r], counted within the room, scratch for padding; None: all


class _Step(NamedTuple):
    """What the rows of a step are fed."""

    last: jax.Array  # i32[R]
    position: jax.Array  # i32[R]
    active: jax.Array  # bool[R]
    knobs: Knobs  # [R] each


def generate(
    graphdef: nnx.GraphDef[Qwen3],
    forms: Forms,
    rooms: tuple[Room, ...],
    routing: bool,
    params: Any,
    state: DecodeState,
    slots: Array,
    counts: tuple[int, ...],
    buckets: tuple[int, ...],
) -> tuple[DecodeState, tuple[Draw, jax.Array | None]]:
    """One token for each of `slots`, and the experts u8[L, S, K] of the tokens that were fed.

    slots: i32[R], room after room, S where a row is padding; not looked at where R = S, all slots.
    counts: r of each room. buckets: T' of each room, 0 where no slot is active: nothing of such a
    room is read or written. Results are by slot, noise where none decodes.
    """
    picked = jnp.asarray(slots) if sum(counts) < len(state.last) else None
    parts = _parts(rooms, counts, picked)
    step = _step(state, rooms, counts, picked)
    keep = functools.partial(pieces.kept, state.k[0])

    def attend(q: jax.Array, k: Any, v: Any, layer: Any) -> tuple[jax.Array, Any]:
        # The layer is picked here, so that it is read in place; the scan would copy it.
        k, v, outs = keep(k), keep(v), []
        for part, bucket, keys, values in zip(parts, buckets, state.k, state.v, strict=True):
            if not bucket:
                outs.append(jnp.zeros_like(q[part.rows]))
                continue
            mask = jnp.arange(bucket)[None, :] < step.position[part.rows, None]  # bool[r, T']
            own = q[part.rows], k[part.rows], v[part.rows], mask
            attend_to = _attend_pieces if forms.cut else _attend_whole
            outs.append(attend_to(own, (keys, values), layer, part.slots))
        return jnp.concatenate(outs), (k[:, 0], v[:, 0])

    layers = jnp.arange(pieces.layers(state.k[0]))
    fed = step.last[:, None], step.position[:, None]
    out = apply(graphdef, params, *fed, attend, layers, want_routing=routing)
    drawn = draw(all_logits(graphdef, params, out.hidden[:, 0]), step.knobs, step.active)
    keys, values = list(state.k), list(state.v)
    for i, (room, part, bucket) in enumerate(zip(rooms, parts, buckets, strict=True)):
        if bucket:
            rows = jnp.arange(room.slots) if part.slots is None else part.slots
            rows = jnp.where(step.active[part.rows], rows, room.slots)  # idle ones: to scratch
            at = rows, step.position[part.rows], bucket, forms.write
            new_k, new_v = (x[:, part.rows, :, None] for x in out.cache)  # f[L, r, KV, 1, hd]
            keys[i] = pieces.put_token(keys[i], new_k, *at)
            values[i] = pieces.put_token(values[i], new_v, *at)
    state = _advanced(state._replace(k=tuple(keys), v=tuple(values)), step, drawn.ids, picked)
    experts = out.routing[:, :, 0].astype(jnp.uint8) if out.routing is not None else None
    if picked is None:
        return state, (drawn, experts)
    count = len(state.last)
    if experts is not None:
        experts = _by_slot(experts.swapaxes(0, 1), picked, count).swapaxes(0, 1)
    return state, (jax.tree.map(lambda x: _by_slot(x, picked, count), drawn), experts)


def _parts(rooms: Sequence[Room], counts: Sequence[int], picked: jax.Array | None) -> list[_Part]:
    parts, first = [], 0
    for room, count in zip(rooms, counts, strict=True):
        rows, slots = slice(first, first + count), None
        if picked is not None:
            at = picked[rows] - room.first
            slots = jnp.where((at >= 0) & (at < room.slots), at, room.slots)
        parts.append(_Part(rows, slots))
        first += count
    return parts


def _step(
    state: DecodeState, rooms: Sequence[Room], counts: Sequence[int], picked: jax.Array | None
) -> _Step:
    fields = state.length, state.last, state.active, state.knobs
    if picked is not None:
        length, last, active, knobs = jax.tree.map(lambda x: x[picked], fields)
        active &= picked < len(state.last)
    else:
        length, last, active, knobs = fields
    lengths = np.concatenate([np.full(n, r.tokens) for n, r in zip(counts, rooms, strict=True)])
    return _Step(last, jnp.minimum(length, jnp.asarray(lengths - 1, jnp.int32)), active, knobs)


def _advanced(
    state: DecodeState, step: _Step, ids: jax.Array, picked: jax.Array | None
) -> DecodeState:
    """The state one token further where rows are active; keys and values are in already."""
    ids, count = jnp.where(step.active, ids, step.last), step.active.astype(jnp.int32)
    if picked is not None:
        ids = state.last.at[picked].set(ids, mode="drop")
        count = _by_slot(count, picked, len(state.last))
    return state._replace(
        length=state.length + count,
        last=ids,
        knobs=state.knobs._replace(step=state.knobs.step + count),
    )


def _by_slot(x: jax.Array, picked: jax.Array, slots: int) -> jax.Array:
    """[R, ...] to [S, ...], zeros elsewhere."""
    return jnp.zeros((slots, *x.shape[1:]), x.dtype).at[picked].set(x, mode="drop")


_Own = tuple[jax.Array, Kept, Kept, jax.Array]  # of the rows: q, k, v, and the mask bool[r, T']


def _attend_whole(
    own: _Own, past: tuple[Cache, Cache], layer: jax.Array, slots: jax.Array | None
) -> jax.Array:
    """Picked slots one by one: a TPU reads a slice in place; for a gather it copies everything."""
    q, k, v, mask = own
    (keys,), (values,) = (cache[0] for cache in past)
    count, bucket = mask.shape
    if slots is None:
        keys, values = (x[layer, :count, :, :bucket] for x in (keys, values))
        return attend_step(q, k, v, keys, values, mask)
    size = (1, 1, keys.shape[2], bucket)

    def one(row: tuple[Any, ...]) -> jax.Array:
        slot, (q, k, v, mask) = row[0], (x[None] for x in row[1:])
        near_k, near_v = (slice_of(x, (layer, slot, 0, 0), size)[0] for x in (keys, values))
        return attend_step(q, k, v, near_k, near_v, mask)[0]

    out: jax.Array = jax.lax.map(one, (slots, *own))
    return out


def _attend_pieces(
    own: _Own, past: tuple[Cache, Cache], layer: jax.Array, slots: jax.Array | None
) -> jax.Array:
    """Where all slots attend, so does scratch: pieces are taken as they are."""
    count, bucket = own[-1].shape
    if slots is None:
        own = jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)), own)

    def branch(number: int) -> Callable[..., jax.Array]:
        keys, values = (pieces.first_blocks(cache, number, bucket) for cache in past)
        if slots is not None:
            keys, values = ([block[slots] for block in blocks] for blocks in (keys, values))
        return lambda q, k, v, mask: attend_step_by_block(q, k, v, keys, values, mask)

    out: jax.Array = jax.lax.switch(layer, [branch(i) for i in range(len(past[0]))], *own)
    return out[:count]

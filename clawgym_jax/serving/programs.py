"""The engine's programs, for one chip: pure functions of parameters and state.

Not here: compiling them, choosing static shapes (`engine`), what attention computes (`attention`).
Invariant: what a slot gets depends on its own tokens, seed and step only.
Axes: see `state`; T' a bucket, the length up to which attention reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clawgym_jax.model.qwen3 import Qwen3, all_logits, apply
from clawgym_jax.serving.attention import attend_chunk, attend_step, attend_step_by_query
from clawgym_jax.serving.sampling import Draw, draw
from clawgym_jax.serving.state import Array, DecodeState, Prefill, Room, Rows

Params = Any
Scores = tuple[jax.Array, jax.Array]  # f32[b, P] of the targets: at the temperature, and at 1


def insert(state: DecodeState, rows: Rows) -> DecodeState:
    """Starts (or stops) decoding in the slots of `rows.mask`."""

    def pick(new: Array, old: jax.Array) -> jax.Array:
        return jnp.where(rows.mask, new, old)

    return state._replace(
        length=pick(rows.length, state.length),
        last=pick(rows.last, state.last),
        active=pick(rows.active, state.active),
        knobs=jax.tree.map(pick, rows.knobs, state.knobs),
    )


def scatter(cache: jax.Array, new: jax.Array, slots: Array, starts: Array | None) -> jax.Array:
    """`cache` f[L, S, KV, T, hd] with `new` f[L, b, KV, P, hd] at [:, slots, :, starts:starts + P].

    P is 1, or starts is None: from 0 on.
    """
    if starts is None:
        return cache.at[:, slots, :, : new.shape[3]].set(new)
    heads = jnp.arange(cache.shape[2])
    return cache.at[:, jnp.asarray(slots)[:, None], heads, jnp.asarray(starts)[:, None]].set(
        new[:, :, :, 0]
    )


def write_rows(cache: jax.Array, new: jax.Array, slots: Array, starts: Array | None) -> jax.Array:
    """As `scatter`, one slot after another."""
    slots = jnp.asarray(slots)
    starts = jnp.zeros_like(slots) if starts is None else starts

    def one(row: jax.Array, cache: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=1)
        return jax.lax.dynamic_update_slice(cache, part, (0, slots[row], 0, starts[row], 0))

    out: jax.Array = jax.lax.fori_loop(0, new.shape[1], one, cache)
    return out


class Forms(NamedTuple):
    """The parts of which CPUs and TPUs want different forms; both give the same to rounding."""

    write: Callable[[jax.Array, jax.Array, Array, Array | None], jax.Array]
    attend: Callable[..., jax.Array]


PLAIN = Forms(scatter, attend_step_by_query)
TPU = Forms(write_rows, attend_step)  # a scatter would copy the whole cache


def generate(
    graphdef: nnx.GraphDef[Qwen3],
    forms: Forms,
    rooms: tuple[Room, ...],
    routing: bool,
    params: Params,
    state: DecodeState,
    buckets: tuple[int, ...],
) -> tuple[DecodeState, tuple[Draw, jax.Array | None]]:
    """One token for every slot, and the experts u8[L, S, K] of the token that was fed.

    buckets: T' of each room, 0 where no slot is active: nothing of such a room is read or written.
    """
    room_of_slot = np.concatenate([np.full(room.slots, room.tokens) for room in rooms])
    position = jnp.minimum(state.length, jnp.asarray(room_of_slot - 1, jnp.int32))
    parts = [slice(room.first, room.first + room.slots) for room in rooms]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        # `cache` is the layer's number: picked here, the layer is read in place; the scan copies.
        outs = []
        for part, bucket, *kv in zip(parts, buckets, state.k, state.v, strict=True):
            if not bucket:
                outs.append(jnp.zeros_like(q[part]))
                continue
            past_k, past_v = (x[cache, : part.stop - part.start, :, :bucket] for x in kv)
            mask = jnp.arange(bucket)[None, :] < position[part, None]  # bool[S, T']
            outs.append(forms.attend(q[part], k[part], v[part], past_k, past_v, mask))
        return jnp.concatenate(outs), (k[:, 0], v[:, 0])

    layers = jnp.arange(state.k[0].shape[0])
    tokens, positions = state.last[:, None], position[:, None]
    out = apply(graphdef, params, tokens, positions, attend, layers, want_routing=routing)
    drawn = draw(all_logits(graphdef, params, out.hidden[:, 0]), state.knobs, state.active)
    keys, values = list(state.k), list(state.v)
    for i, (part, bucket) in enumerate(zip(parts, buckets, strict=True)):
        if bucket:
            count = part.stop - part.start  # idle slots write to scratch
            rows = jnp.where(state.active[part], jnp.arange(count), count)
            new_k, new_v = (x[:, part, :, None] for x in out.cache)  # f[L, S, KV, 1, hd]
            keys[i] = forms.write(keys[i], new_k, rows, position[part])
            values[i] = forms.write(values[i], new_v, rows, position[part])
    step = state.active.astype(jnp.int32)
    state = state._replace(
        k=tuple(keys),
        v=tuple(values),
        length=state.length + step,
        last=jnp.where(state.active, drawn.ids, state.last),
        knobs=state.knobs._replace(step=state.knobs.step + step),
    )
    experts = out.routing[:, :, 0].astype(jnp.uint8) if out.routing is not None else None
    return state, (drawn, experts)


def prefill(
    graphdef: nnx.GraphDef[Qwen3],
    forms: Forms,
    routing: bool,
    params: Params,
    state: DecodeState,
    batch: Prefill,
    room: int,
    bucket: int,
    score: bool,
) -> tuple[DecodeState, tuple[Scores | None, jax.Array | None]]:
    """Keys and values of suffixes; on request log-probs, and experts u8[L, b, P, K]."""
    keys, values = state.k[room], state.v[room]
    size = batch.tokens.shape[1]
    position = batch.starts[:, None] + jnp.arange(size)[None, :]  # i32[b, P]
    position = jnp.minimum(position, keys.shape[3] - 1)
    rows = jnp.arange(batch.tokens.shape[0])[:, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        past_k = cache[0].at[rows, :, position].set(k, mode="drop")
        past_v = cache[1].at[rows, :, position].set(v, mode="drop")
        return attend_chunk(q, past_k, past_v, position), (past_k, past_v)

    cache = (keys[:, batch.sources, :, :bucket], values[:, batch.sources, :, :bucket])
    tokens = jnp.asarray(batch.tokens)
    out = apply(graphdef, params, tokens, position, attend, cache, want_routing=routing)
    new_k, new_v = out.cache
    state = state._replace(
        k=_with(state.k, room, forms.write(keys, new_k, batch.slots, None)),
        v=_with(state.v, room, forms.write(values, new_v, batch.slots, None)),
    )
    experts = out.routing.astype(jnp.uint8) if out.routing is not None else None
    if not score:
        return state, (None, experts)
    logits = all_logits(graphdef, params, out.hidden).astype(jnp.float32)
    temperature = jnp.where(batch.temperature <= 0, 1.0, batch.temperature)[:, None, None]
    scores = (_pick(logits / temperature, batch.targets), _pick(logits, batch.targets))
    return state, (scores, experts)


def copy(
    state: DecodeState, source: Array, target: Array, source_room: int, room: int, bucket: int
) -> DecodeState:
    """The first T' keys and values of a slot in a slot of another room."""

    def one(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        taken = jax.lax.dynamic_slice_in_dim(parts[source_room], source, 1, axis=1)[
            :, :, :, :bucket
        ]
        at = (0, target, 0, 0, 0)
        return _with(parts, room, jax.lax.dynamic_update_slice(parts[room], taken, at))

    return state._replace(k=one(state.k), v=one(state.v))


def save(
    state: DecodeState, slot: Array, first: Array, pages: Array, count: Array, room: int
) -> DecodeState:
    """Copies `count` pages of a slot, from its page `first` on, to `pages` i32[T / page]."""

    def one(pool: jax.Array, keys: jax.Array) -> jax.Array:
        size = (pool.shape[0], 1, *pool.shape[2:])

        def page(i: jax.Array, pool: jax.Array) -> jax.Array:
            at = (0, slot, 0, (first + i) * size[3], 0)
            taken = jax.lax.dynamic_slice(keys, at, size)
            return jax.lax.dynamic_update_slice(pool, taken, (0, pages[i], 0, 0, 0))

        out: jax.Array = jax.lax.fori_loop(0, count, page, pool)
        return out

    assert state.pool_k is not None and state.pool_v is not None
    return state._replace(
        pool_k=one(state.pool_k, state.k[room]), pool_v=one(state.pool_v, state.v[room])
    )


def restore(state: DecodeState, slot: Array, pages: Array, count: Array, room: int) -> DecodeState:
    """Copies `count` pages to the beginning of a slot."""

    def one(keys: jax.Array, pool: jax.Array) -> jax.Array:
        def page(i: jax.Array, keys: jax.Array) -> jax.Array:
            taken = jax.lax.dynamic_slice_in_dim(pool, pages[i], 1, axis=1)
            at = (0, slot, 0, i * pool.shape[3], 0)
            return jax.lax.dynamic_update_slice(keys, taken, at)

        out: jax.Array = jax.lax.fori_loop(0, count, page, keys)
        return out

    assert state.pool_k is not None and state.pool_v is not None
    return state._replace(
        k=_with(state.k, room, one(state.k[room], state.pool_k)),
        v=_with(state.v, room, one(state.v[room], state.pool_v)),
    )


def _with(parts: tuple[jax.Array, ...], index: int, new: jax.Array) -> tuple[jax.Array, ...]:
    return (*parts[:index], new, *parts[index + 1 :])


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target]: f32[b, P]"""
    chosen = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)

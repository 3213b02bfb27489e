"""The engine's programs but for the decode step (`decode`) and copies (`moves`), for one chip.

Pure functions of parameters and state. Not here: compiling them, choosing static shapes (`engine`),
what attention computes (`attention`).
Invariant: what a slot gets depends on its own tokens only.
Axes: see `state`; T' a bucket, the length up to which attention reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.model.qwen3 import Output, Qwen3, all_logits, apply
from clawgym_jax.serving import pieces
from clawgym_jax.serving.attention import attend_chunk, attend_chunk_by_block
from clawgym_jax.serving.moves import replaced
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.quantised import Kept, slice_of, with_entries, with_slice
from clawgym_jax.serving.state import Array, DecodeState, Prefill, Rows

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


def scatter(cache: Kept, new: Kept, slots: Array, starts: Array | None) -> Kept:
    """`cache` f[L, S, KV, T, hd] with `new` f[L, b, KV, P, hd] at [:, slots, :, starts:starts + P].

    P is 1, or starts is None: from 0 on.
    """
    if starts is None:
        at = slice(None), slots, slice(None), slice(new.shape[3])
        return with_entries(cache, new, at)
    heads = jnp.arange(cache.shape[2])
    place = slice(None), jnp.asarray(slots)[:, None], heads, jnp.asarray(starts)[:, None]
    return with_entries(cache, new[:, :, :, 0], place)


def write_rows(cache: Kept, new: Kept, slots: Array, starts: Array | None) -> Kept:
    """As `scatter`, one slot after another."""
    slots = jnp.asarray(slots)
    starts = jnp.zeros_like(slots) if starts is None else jnp.asarray(starts)

    def one(row: jax.Array, cache: Kept) -> Kept:
        size = new.shape[0], 1, *new.shape[2:4]
        return with_slice(
            cache, slice_of(new, (0, row, 0, 0), size), (0, slots[row], 0, starts[row])
        )

    out: Kept = jax.lax.fori_loop(0, new.shape[1], one, cache)
    return out


class Forms(NamedTuple):
    """The parts of which CPUs and TPUs want different forms; both give the same to rounding."""

    write: pieces.Write
    cut: bool  # keys and values are kept in pieces


PLAIN = Forms(scatter, cut=True)
TPU = Forms(write_rows, cut=False)  # a scatter would copy the whole cache


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
    position = jnp.minimum(position, pieces.tokens(keys) - 1)
    run = functools.partial(
        apply, graphdef, params, jnp.asarray(batch.tokens), position, want_routing=routing
    )
    if forms.cut:
        out, keys, values = _fill_pieces(run, keys, values, batch, bucket)
    else:
        where = batch, position, bucket, forms.write
        out, keys, values = _fill_whole(run, keys, values, *where)
    state = state._replace(k=replaced(state.k, room, keys), v=replaced(state.v, room, values))
    experts = out.routing.astype(jnp.uint8) if out.routing is not None else None
    if not score:
        return state, (None, experts)
    logits = all_logits(graphdef, params, out.hidden).astype(jnp.float32)
    temperature = jnp.where(batch.temperature <= 0, 1.0, batch.temperature)[:, None, None]
    scores = (_pick(logits / temperature, batch.targets), _pick(logits, batch.targets))
    return state, (scores, experts)


def _fill_whole(
    run: Callable[..., Output],
    keys: Cache,
    values: Cache,
    batch: Prefill,
    position: jax.Array,
    bucket: int,
    write: pieces.Write,
) -> tuple[Output, Cache, Cache]:
    """Prefixes and suffixes are written together; T' covers both."""
    rows = jnp.arange(batch.tokens.shape[0])[:, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        past_k, past_v = (
            with_entries(past, pieces.kept(keys, new), (rows, slice(None), position), mode="drop")
            for past, new in zip(cache, (k, v), strict=True)
        )
        return attend_chunk(q, past_k, past_v, position), (past_k, past_v)

    out = run(attend, tuple(pieces.take(x, batch.sources, bucket) for x in (keys, values)))
    new_k, new_v = out.cache
    keys = pieces.put(keys, new_k, batch.slots, write)
    return out, keys, pieces.put(values, new_v, batch.slots, write)


def _fill_pieces(
    run: Callable[..., Output], keys: Cache, values: Cache, batch: Prefill, bucket: int
) -> tuple[Output, Cache, Cache]:
    """The prefixes are in their slots already (`copy`); T' covers them and only them."""
    slots, starts = jnp.asarray(batch.slots), jnp.asarray(batch.starts)

    def attend(q: jax.Array, k: Any, v: Any, layer: Any) -> tuple[jax.Array, Any]:
        k, v = pieces.kept(keys, k), pieces.kept(values, v)

        def branch(number: int) -> Callable[..., jax.Array]:
            def attend_to(q: jax.Array, k: Kept, v: Kept) -> jax.Array:
                past_k, past_v = (
                    [block[slots] for block in pieces.first_blocks(x, number, bucket)]
                    for x in (keys, values)
                )
                return attend_chunk_by_block(q, k, v, past_k, past_v, starts)

            return attend_to

        branches = [branch(i) for i in range(pieces.layers(keys))]
        return jax.lax.switch(layer, branches, q, k, v), (k, v)

    out = run(attend, jnp.arange(pieces.layers(keys)))
    new_k, new_v = out.cache
    where = batch.slots, batch.starts, bucket
    return out, pieces.put_chunk(keys, new_k, *where), pieces.put_chunk(values, new_v, *where)


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target]: f32[b, P]"""
    chosen = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)

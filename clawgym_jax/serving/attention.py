"""How the engine's queries attend to the keys and values of their slots.

`attend_step`: one query per slot (decode); `attend_step_by_block`, its form for CPUs.
`attend_chunk`: a chunk of a prompt (prefill), in blocks of keys with a running softmax where the
slot is long, so that no P x T scores are stored and blocks behind the chunk's end cost nothing; a
47,000-token prompt is a matter of seconds then, not minutes.
Keys and values may be integers with scales: products take the integers, scores and weights the
scales.
Not here: where keys and values are kept (`state`).
Invariant: what a query gets depends on the keys up to its own position only.
Axes: b rows, P queries, T keys, H query heads in KV groups of G, hd head width, S slots.
Source: FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clawgym_jax.serving.quantised import Kept, numbers, read, scaled

BLOCK = 512  # keys of a block; slots up to this length are attended to at once
_LOWEST = -1e30  # below any score, yet finite: differences of two of them are not NaN


def attend_step(
    q: jax.Array, k: Kept, v: Kept, past_k: Kept, past_v: Kept, mask: jax.Array
) -> jax.Array:
    """One query per slot over its past and itself. q f[S,1,H,hd], k, v f[S,1,KV,hd],
    past f[S,KV,T,hd], mask bool[S,T].

    Products in the cache's own type. (Written as multiply and reduce, a TPU's program writes the
    whole cache out in float32 first: 3 bytes for every byte of the cache beside the read itself.)
    """
    scores = _dot("skgd,sktd->skgt", *_grouped(q, past_k))
    return _step(scaled(scores, past_k), q, k, v, [past_v], mask)


def attend_step_by_block(
    q: jax.Array,
    k: Kept,
    v: Kept,
    past_k: Sequence[Kept],
    past_v: Sequence[Kept],
    mask: jax.Array,
) -> jax.Array:
    """As `attend_step`, the past in blocks of tokens f[S,KV,t,hd], the scores query by query.

    A CPU's product of a matrix and a vector reads the matrix as it lies, that of two matrices
    rearranges it first. For few queries to a key.
    """
    scores = []
    for block in past_k:
        grouped, keys = _grouped(q, block)
        each = [_dot("skd,sktd->skt", grouped[:, :, i], keys) for i in range(grouped.shape[2])]
        scores.append(scaled(jnp.stack(each, axis=2), block))
    return _step(jnp.concatenate(scores, axis=-1), q, k, v, past_v, mask)


def _grouped(q: jax.Array, past_k: Kept) -> tuple[jax.Array, jax.Array]:
    """Queries f[S, KV, G, hd] by their keys, over sqrt(hd), in the type of these; and the keys."""
    slots, _, heads, width = q.shape
    keys = numbers(past_k, q.dtype)
    kv = keys.shape[1]
    grouped = q.reshape(slots, kv, heads // kv, width) / math.sqrt(width)
    return grouped.astype(keys.dtype), keys


def _step(
    past: jax.Array,  # f32[S, KV, G, T], scores
    q: jax.Array,
    k: Kept,
    v: Kept,
    past_v: Sequence[Kept],
    mask: jax.Array,
) -> jax.Array:
    grouped = q.reshape(*past.shape[:3], -1) / math.sqrt(q.shape[-1])
    own = scaled(_dot("skgd,skd->skg", grouped, numbers(k[:, 0], q.dtype)), k[:, 0, :, None])
    past = jnp.where(mask[:, None, None, :], past, -jnp.inf)
    peak = jnp.maximum(jnp.max(past, axis=-1), own)
    past, own = jnp.exp(past - peak[..., None]), jnp.exp(own - peak)
    total = jnp.sum(past, axis=-1) + own
    out, first = jnp.zeros((), jnp.float32), 0
    for block in past_v:
        weights, values = _weighted(past[..., first : first + block.shape[2]], block, q.dtype)
        out = out + _dot("skgt,sktd->skgd", weights, values)
        first += block.shape[2]
    out = (out + own[..., None] * read(v[:, 0, :, None])) / total[..., None]
    return out.astype(q.dtype).reshape(q.shape)


def _weighted(weights: jax.Array, values: Kept, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The factors of weights f32[b, KV, ..., t] times values f[b, KV, t, hd], of one type."""
    factor = numbers(values, dtype)
    return scaled(weights, values).astype(factor.dtype), factor


def attend_chunk(
    q: jax.Array,  # f[b, P, H, hd]
    past_k: Kept,  # f[b, KV, T, hd], the chunk's own keys included
    past_v: Kept,  # f[b, KV, T, hd]
    position: jax.Array,  # i32[b, P]
    block: int = BLOCK,
) -> jax.Array:
    """P queries per row, each over the keys at and before its position. f[b, P, H, hd]"""
    if past_k.shape[2] <= block:
        return _attend_at_once(q, past_k, past_v, position)
    return _attend_in_blocks(q, past_k, past_v, position, block)


def _attend_at_once(q: jax.Array, past_k: Kept, past_v: Kept, position: jax.Array) -> jax.Array:
    batch, size, heads, width = q.shape
    kv = past_k.shape[1]
    mask = jnp.arange(past_k.shape[2])[None, None, :] <= position[:, :, None]  # bool[b, P, T]
    grouped = q.reshape(batch, size, kv, heads // kv, width)
    scores = scaled(_dot("bpkgd,bktd->bkgpt", grouped, numbers(past_k, q.dtype)), past_k)
    scores = jnp.where(mask[:, None, None], scores / math.sqrt(width), -jnp.inf)
    weights, values = _weighted(jax.nn.softmax(scores, axis=-1), past_v, q.dtype)
    return jnp.einsum("bkgpt,bktd->bpkgd", weights, values).reshape(q.shape)


def _attend_in_blocks(
    q: jax.Array, past_k: Kept, past_v: Kept, position: jax.Array, block: int
) -> jax.Array:
    batch, size, heads, width = q.shape
    kv = past_k.shape[1]
    group = heads // kv
    queries = q.reshape(batch, size, kv, group, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, kv, group * size, width)  # f[b, KV, G * P, hd]
    keys, values = _by_block(past_k, block), _by_block(past_v, block)
    seen_until = jnp.tile(position, (1, group))[:, None, :, None]  # i32[b, 1, G * P, 1]
    scale = 1.0 / math.sqrt(width)

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        seen = j * block + jnp.arange(block) <= seen_until
        near = keys[j]
        scores = scaled(_dot("bkqd,bktd->bkqt", queries, numbers(near, q.dtype)), near) * scale
        higher = jnp.maximum(top, jnp.max(jnp.where(seen, scores, _LOWEST), axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        shrink = jnp.exp(top - higher)
        added = _dot("bkqt,bktd->bkqd", *_weighted(weights, values[j], q.dtype))
        return (
            higher,
            total * shrink + jnp.sum(weights, axis=-1),
            acc * shrink[..., None] + added,
        )

    start = (
        jnp.full(queries.shape[:3], _LOWEST, jnp.float32),
        jnp.zeros(queries.shape[:3], jnp.float32),
        jnp.zeros(queries.shape, jnp.float32),
    )
    count = jnp.max(position) // block + 1  # blocks that some query sees
    _, total, acc = jax.lax.fori_loop(0, count, step, start)
    out: jax.Array = (acc / total[..., None]).astype(q.dtype)
    out = out.reshape(batch, kv, group, size, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def attend_chunk_by_block(
    q: jax.Array,  # f[b, P, H, hd]
    k: Kept,  # f[b, P, KV, hd], the chunk's own
    v: Kept,
    past_k: Sequence[Kept],  # f[b, KV, t, hd] each, one after another
    past_v: Sequence[Kept],
    starts: jax.Array,  # i32[b], how many of the past ones count
    block: int = 4 * BLOCK,
) -> jax.Array:
    """As `attend_chunk`, the chunk's own keys and values apart from those before it.

    block: a longer one of the past is attended to in parts, as far as somebody sees it.
    """
    batch, size, heads, width = q.shape
    kv = k.shape[2]
    queries = q.reshape(batch, size, kv, heads // kv, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, kv, -1, width) / math.sqrt(width)  # f[b, KV, G * P, hd]
    keys, values = jax.tree.map(lambda x: x.swapaxes(1, 2), (k, v))
    order = jnp.arange(size)
    own = jnp.tile(order[:, None] >= order, (heads // kv, 1))  # bool[G * P, P]
    seen = _absorb(_nothing(queries), queries, keys, values, own)
    first = 0
    for block_k, block_v in zip(past_k, past_v, strict=True):
        before = jnp.minimum(starts - first, block_k.shape[2])
        if block_k.shape[2] <= block:
            mask = _below(before, block_k.shape[2])
            seen = _absorb(seen, queries, block_k, block_v, mask)
        else:
            seen = _absorb_in_parts(seen, queries, block_k, block_v, before, block)
        first += block_k.shape[2]
    _, total, acc = seen
    out = (acc / total[..., None]).astype(q.dtype).reshape(batch, kv, heads // kv, size, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


_Seen = tuple[jax.Array, jax.Array, jax.Array]  # top, total f32[b, KV, Q], weighted f32[..., hd]


def _nothing(queries: jax.Array) -> _Seen:
    rows = queries.shape[:3]
    top, total = jnp.full(rows, _LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32)
    return top, total, jnp.zeros(queries.shape, jnp.float32)


def _below(count: jax.Array, size: int) -> jax.Array:
    """bool[b, 1, 1, size]: the first `count` i32[b]."""
    return (jnp.arange(size) < count[:, None])[:, None, None]


def _absorb(seen: _Seen, queries: jax.Array, keys: Kept, values: Kept, mask: jax.Array) -> _Seen:
    """What queries f[b, KV, Q, hd] have seen, and keys f[b, KV, t, hd] on top of it."""
    top, total, acc = seen
    scores = scaled(_dot("bkqd,bktd->bkqt", queries, numbers(keys, queries.dtype)), keys)
    scores = jnp.where(mask, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
    added = _dot("bkqt,bktd->bkqd", *_weighted(weights, values, queries.dtype))
    total = total * shrink + jnp.sum(weights, axis=-1)
    return higher, total, acc * shrink[..., None] + added


def _absorb_in_parts(
    seen: _Seen,
    queries: jax.Array,
    keys: Kept,
    values: Kept,
    before: jax.Array,
    size: int,
) -> _Seen:
    keys, values = _by_block(keys, size), _by_block(values, size)

    def step(j: jax.Array, seen: _Seen) -> _Seen:
        return _absorb(seen, queries, keys[j], values[j], _below(before - j * size, size))

    count = jnp.clip((jnp.max(before) + size - 1) // size, 0, keys.shape[0])
    out: _Seen = jax.lax.fori_loop(0, count, step, seen)
    return out


def _by_block(x: Kept, block: int) -> Kept:
    """f[b, KV, T, hd] to f[n, b, KV, block, hd], padded to whole blocks."""

    def one(x: jax.Array) -> jax.Array:
        batch, kv, length, *width = x.shape
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -length % block), *((0, 0) for _ in width)))
        return jnp.moveaxis(x.reshape(batch, kv, -1, block, *width), 2, 0)

    out: Kept = jax.tree.map(one, x)
    return out


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

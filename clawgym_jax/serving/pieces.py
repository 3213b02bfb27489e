"""The keys (or values) of a room's slots, in one array or in pieces, and how they are read.

A TPU's program reads parts of an array in place; there a room is one piece. A CPU's program copies
what it takes from an array before it multiplies, which costs more than the product; there every
layer is a piece of its own, and so is every stretch of tokens between two attention lengths: what a
decode step reads are whole arrays then.
A piece is an array, or integers with their scales (`quantised`); the last axis is never cut.
Not here: programs (`programs`), what attention computes (`attention`).
Invariant: all functions give the same for any cut.
Axes: see `state`; T' a bucket, l layers and t tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clawgym_jax.serving import quantised
from clawgym_jax.serving.quantised import Kept, with_entries, with_slice

Array = Any  # numpy on the way in, traced inside a program
Cache = tuple[tuple[Kept, ...], ...]  # by layers, then by tokens: f[l, S + 1, KV, t, hd]
Write = Callable[[Kept, Kept, Array, Array | None], Kept]


def empty(shape: tuple[int, int, int, int, int], dtype: Any, edges: Sequence[int]) -> Cache:
    """Zeros for f[L, S + 1, KV, T, hd].

    dtype: int8 for integers with scales. edges: where the tokens are cut; T is the last. ():
    neither they nor the layers are.
    """
    layers, slots, heads, _, width = shape
    if not edges:
        return ((quantised.zeros(shape, dtype),),)
    firsts = [0, *edges[:-1]]
    return tuple(
        tuple(
            quantised.zeros((1, slots, heads, end - first, width), dtype)
            for first, end in zip(firsts, edges, strict=True)
        )
        for _ in range(layers)
    )


def is_whole(cache: Cache) -> bool:
    """Whether it is one array; so is a cut one of one layer and one stretch."""
    return len(cache) == 1 and len(cache[0]) == 1


def tokens(cache: Cache) -> int:
    """T"""
    return sum(piece.shape[3] for piece in cache[0])


def layers(cache: Cache) -> int:
    """L"""
    return sum(blocks[0].shape[0] for blocks in cache)


def kept(cache: Cache, x: jax.Array) -> Kept:
    """f[..., hd] as the cache keeps it."""
    return quantised.kept_as(cache[0][0], x)


def take(cache: Cache, slots: Array, bucket: int) -> Kept:
    """f[L, b, KV, T', hd] of slots i32[b]."""
    return _joined(cache, bucket, lambda piece, size: piece[:, slots, :, :size])


def take_one(cache: Cache, slot: Array, bucket: int) -> Kept:
    """f[L, 1, KV, T', hd] of a slot."""

    def part(piece: Kept, size: int) -> Kept:
        row: Kept = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=1), piece)
        return row[:, :, :, :size]

    return _joined(cache, bucket, part)


def put(cache: Cache, new: Kept, slots: Array, write: Write) -> Cache:
    """With `new` f[L, b, KV, T', hd] as the beginning of slots i32[b]."""
    return _with(cache, new, lambda piece, part: write(piece, part, slots, None))


def put_one(cache: Cache, new: Kept, slot: Array) -> Cache:
    """With `new` f[L, 1, KV, T', hd] as the beginning of a slot."""
    return _with(cache, new, lambda piece, part: with_slice(piece, part, (0, slot, 0, 0)))


def put_token(
    cache: Cache, new: Kept, rows: Array, position: Array, bucket: int, write: Write
) -> Cache:
    """With `new` f[L, S, KV, 1, hd] at `position` i32[S] < T' of slots `rows` i32[S]."""
    if is_whole(cache):
        return ((write(cache[0][0], new, rows, position),),)
    out = []
    for layer, blocks in enumerate(cache):
        written = list(blocks)
        for i, (first, size) in enumerate(_blocks(blocks, bucket)):
            inside = (position >= first) & (position < first + size)
            at = jnp.where(inside, position - first, blocks[i].shape[3])  # outside: not written
            written[i] = write(blocks[i], new[layer : layer + 1], rows, at)
        out.append(tuple(written))
    return tuple(out)


def put_chunk(cache: Cache, new: Kept, slots: Array, starts: Array, bucket: int) -> Cache:
    """With `new` f[L, b, P, KV, hd] from `starts` i32[b] <= T' on in slots i32[b]; pieces only."""
    reach, out = bucket + new.shape[2], []
    position = jnp.asarray(starts)[:, None] + jnp.arange(new.shape[2])
    for layer, blocks in enumerate(cache):
        written = list(blocks)
        for i, (first, _) in enumerate(_blocks(blocks, reach)):
            size = blocks[i].shape[3]
            inside = (position >= first) & (position < first + size)
            at = jnp.where(inside, position - first, size)  # outside: not written
            place = 0, jnp.asarray(slots)[:, None], slice(None), at
            written[i] = with_entries(blocks[i], new[layer], place, mode="drop")
        out.append(tuple(written))
    return tuple(out)


def first_blocks(cache: Cache, layer: int, bucket: int) -> list[Kept]:
    """f[S + 1, KV, t, hd] of a layer's pieces up to T', which is where one ends; pieces only."""
    return [cache[layer][i][0] for i, _ in enumerate(_blocks(cache[layer], bucket))]


def _blocks(blocks: Sequence[Kept], bucket: int) -> Iterator[tuple[int, int]]:
    """(first token, how many of them are below T') of the pieces that have any."""
    first = 0
    for piece in blocks:
        if first < bucket:
            yield first, min(piece.shape[3], bucket - first)
        first += piece.shape[3]


def _joined(cache: Cache, bucket: int, part: Callable[[Kept, int], Kept]) -> Kept:
    rows = [
        _concatenate([part(blocks[i], n) for i, (_, n) in enumerate(_blocks(blocks, bucket))], 3)
        for blocks in cache
    ]
    return _concatenate(rows, 0)


def _concatenate(parts: list[Kept], axis: int) -> Kept:
    if len(parts) == 1:
        return parts[0]
    joined: Kept = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *parts)
    return joined


def _with(cache: Cache, new: Kept, write: Callable[[Kept, Kept], Kept]) -> Cache:
    out, layer = [], 0
    for blocks in cache:
        written, count = list(blocks), blocks[0].shape[0]
        for i, (first, size) in enumerate(_blocks(blocks, new.shape[3])):
            part = new[layer : layer + count, :, :, first : first + size]
            written[i] = write(blocks[i], part)
        out.append(tuple(written))
        layer += count
    return tuple(out)

"""Which pairs of a query block and a key block hold attention at all: masks, counts and lists.

A row's tokens stand in blocks of `block_q` queries and `block_k` keys; query i sees key j iff
`j <= i < end[j]` (`attention`).  A pair of blocks is live iff `kv_first <= q_last` and
`max(end[kv block]) > q_first`, and full (every query sees every key, no mask needed) iff
`kv_last <= q_first` and `min(end[kv block]) > q_last`.

Counts are exact, so they are how the work of an attention kernel is measured without running it.
The functions take NumPy and JAX arrays alike; `list_pairs` is for JAX only.
Not here: attention.  Invariant: a full pair is live, and the diagonal of every row is live.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FIRST, LAST, FULL = 1, 2, 4  # flags of a listed pair
_FLAG_BITS, _BLOCK_BITS = 3, 14
_HELD_SHIFT = _FLAG_BITS + _BLOCK_BITS
_NONE = np.int32(2**31 - 1)  # stands behind the last live pair of a list
MAX_BLOCKS = 2**_BLOCK_BITS - 1  # of one kind in one list
MAX_ROW_TOK = 92_681  # the longest row whose seeing pairs fit in 32 bits


class Counts(NamedTuple):
    """Work of one attention call, per row."""

    live: Any  # i32[...], block pairs that are computed: full + partial
    full: Any  # i32[...], of these, without a mask
    partial: Any  # i32[...], of these, with a mask
    token_pairs: Any  # u32[...], (query, key) pairs that see each other: the least work possible


def live_blocks(end: Any, block_q: int, block_k: int) -> Any:
    """bool[..., nq, nk] for `end` i32[..., N]: some query of the block may see some key."""
    q_first, k_first = _starts(end.shape[-1], block_q, block_k)
    reach = _by_block(end, block_k).max(-1)  # i32[..., nk], furthest end in a key block
    below = k_first[None, :] <= q_first[:, None] + block_q - 1
    return below & (reach[..., None, :] > q_first[:, None])


def full_blocks(end: Any, block_q: int, block_k: int) -> Any:
    """bool[..., nq, nk] for `end` i32[..., N]: every query of the block sees every key."""
    q_first, k_first = _starts(end.shape[-1], block_q, block_k)
    nearest = _by_block(end, block_k).min(-1)  # i32[..., nk]
    below = k_first[None, :] + block_k - 1 <= q_first[:, None]
    return below & (nearest[..., None, :] > q_first[:, None] + block_q - 1)


def count_pairs(end: Any, block_q: int, block_k: int) -> Counts:
    """The work in each row of `end` i32[..., N]; N is a multiple of both blocks."""
    length = end.shape[-1]
    if length > MAX_ROW_TOK:
        raise ValueError(f"end: expected rows of at most {MAX_ROW_TOK} tokens, got {length}")
    xp = jnp if isinstance(end, jax.Array) else np
    live = live_blocks(end, block_q, block_k).sum((-2, -1), dtype=xp.int32)
    full = full_blocks(end, block_q, block_k).sum((-2, -1), dtype=xp.int32)
    seen = (end - np.arange(length, dtype=np.int32)).astype(xp.uint32)  # queries that see a key
    return Counts(live, full, live - full, seen.sum(-1, dtype=xp.uint32))


def most_pairs(length: int, block_q: int, block_k: int) -> int:
    """Live pairs of a causal row, the most that any row of this length can have."""
    q_first, k_first = _starts(length, block_q, block_k)
    return int(np.sum(k_first[None, :] <= q_first[:, None] + block_q - 1))


class PairList(NamedTuple):
    """The live pairs of some rows in the order in which a kernel visits them.

    One block of a pair is *held* while the other kind of block is *streamed* past it: pairs are
    sorted by the held block, then by the streamed one.  Blocks are numbered through all rows.
    """

    words: jax.Array  # i32[rows * most_pairs], a pair and its flags each; read by `held` etc.
    number: jax.Array  # i32[], how many of the words are pairs


def list_pairs(end: jax.Array, block_q: int, block_k: int, hold_queries: bool) -> PairList:
    """Lists the live pairs of `end` i32[B, N]; holds query blocks, or else key blocks."""
    live = live_blocks(end, block_q, block_k)  # bool[B, nq, nk]
    rows, num_q, num_k = live.shape
    if rows * max(num_q, num_k) > MAX_BLOCKS:
        raise ValueError(
            f"expected at most {MAX_BLOCKS} blocks in a call, got {rows} rows of {num_q} x {num_k}"
            ": use larger blocks or fewer rows"
        )
    row = np.arange(rows, dtype=np.int32)[:, None, None]
    query = row * num_q + np.arange(num_q, dtype=np.int32)[:, None]
    key = row * num_k + np.arange(num_k, dtype=np.int32)
    held, streamed = (query, key) if hold_queries else (key, query)
    flags = jnp.where(full_blocks(end, block_q, block_k), np.int32(FULL), np.int32(0))
    words = (held << _HELD_SHIFT | streamed << _FLAG_BITS) | flags
    words = jnp.sort(jnp.where(live, words, _NONE).ravel(), stable=False)
    words = words[: rows * most_pairs(end.shape[1], block_q, block_k)]
    turns = jnp.diff(words >> _HELD_SHIFT) != 0  # where the held block changes
    words |= jnp.where(jnp.pad(turns, (1, 0), constant_values=True), np.int32(FIRST), np.int32(0))
    words |= jnp.where(jnp.pad(turns, (0, 1), constant_values=True), np.int32(LAST), np.int32(0))
    return PairList(words, jnp.sum(live, dtype=jnp.int32))


def held(word: Any) -> Any:
    """The held block of a listed pair."""
    return word >> _HELD_SHIFT


def streamed(word: Any) -> Any:
    """The streamed block of a listed pair."""
    return (word >> _FLAG_BITS) & (2**_BLOCK_BITS - 1)


def has(word: Any, flag: int) -> Any:
    """Whether a listed pair is FIRST or LAST of its held block, or FULL."""
    return (word & flag) != 0


def _starts(length: int, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    if length % block_q or length % block_k:
        raise ValueError(f"expected blocks that divide {length} tokens, got {block_q} x {block_k}")
    return np.arange(0, length, block_q, dtype=np.int32), np.arange(
        0, length, block_k, dtype=np.int32
    )


def _by_block(end: Any, block: int) -> Any:
    return end.reshape(*end.shape[:-1], -1, block)

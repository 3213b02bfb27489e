"""Live, full and listed block pairs against the token mask they summarise."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.model import live_blocks
from tests.model import forests

LENGTH = 64
BLOCKS = [(8, 8), (16, 8), (8, 16), (64, 64)]
blocks_and_ends = given(end=forests.forests(LENGTH), blocks=st.sampled_from(BLOCKS))


def _mask(end: np.ndarray) -> np.ndarray:
    """bool[B, N, N], the definition."""
    index = np.arange(end.shape[-1])
    return (index[None, :] <= index[:, None]) & (index[:, None] < end[:, None, :])


def _by_pair(mask: np.ndarray, bq: int, bk: int) -> np.ndarray:
    """[B, nq, bq, nk, bk]."""
    rows, length, _ = mask.shape
    return mask.reshape(rows, length // bq, bq, length // bk, bk)


@blocks_and_ends
def test_no_live_pair_is_skipped_and_few_dead_ones_are_kept(
    end: np.ndarray, blocks: tuple[int, int]
) -> None:
    needed = _by_pair(_mask(end), *blocks).any(axis=(2, 4))
    live = live_blocks.live_blocks(end, *blocks)
    np.testing.assert_array_equal(needed & ~live, False)
    if blocks[0] == blocks[1]:  # a live pair off the diagonal reaches into its query block
        np.testing.assert_array_equal(live, needed)


@blocks_and_ends
def test_full_pairs_are_those_that_need_no_mask(end: np.ndarray, blocks: tuple[int, int]) -> None:
    unmasked = _by_pair(_mask(end), *blocks).all(axis=(2, 4))
    np.testing.assert_array_equal(live_blocks.full_blocks(end, *blocks), unmasked)


@blocks_and_ends
def test_counts_agree_with_the_mask_and_between_numpy_and_jax(
    end: np.ndarray, blocks: tuple[int, int]
) -> None:
    ours, theirs = (live_blocks.count_pairs(x, *blocks) for x in (end, jnp.asarray(end)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(ours.token_pairs, _mask(end).sum((1, 2)))
    np.testing.assert_array_equal(ours.full + ours.partial, ours.live)
    area = blocks[0] * blocks[1]
    assert np.all(ours.full * area <= ours.token_pairs)
    assert np.all(ours.token_pairs <= ours.live * area)


@blocks_and_ends
def test_lists_hold_every_live_pair_once_in_order(end: np.ndarray, blocks: tuple[int, int]) -> None:
    live, full = (f(end, *blocks) for f in (live_blocks.live_blocks, live_blocks.full_blocks))
    num_q, num_k = live.shape[1:]
    for hold_queries in (True, False):
        words, number = live_blocks.list_pairs(jnp.asarray(end), *blocks, hold_queries)
        words = np.asarray(words)[: int(number)]
        held, streamed = live_blocks.held(words), live_blocks.streamed(words)
        query, key = (held, streamed) if hold_queries else (streamed, held)
        at = query // num_q, query % num_q, key % num_k
        np.testing.assert_array_equal(key // num_k, at[0])  # a pair lies in one row
        listed = np.zeros_like(live)
        listed[at] = True
        np.testing.assert_array_equal(listed, live)
        np.testing.assert_array_equal(live_blocks.has(words, live_blocks.FULL), full[at])
        order = np.lexsort((streamed, held))
        np.testing.assert_array_equal(order, np.arange(len(words)))
        edge = np.flatnonzero(np.diff(held))
        first, last = (live_blocks.has(words, x) for x in (live_blocks.FIRST, live_blocks.LAST))
        np.testing.assert_array_equal(np.flatnonzero(first), [0, *(edge + 1)])
        np.testing.assert_array_equal(np.flatnonzero(last), [*edge, len(words) - 1])


def test_a_causal_row_is_the_longest_list() -> None:
    end = np.full((1, LENGTH), LENGTH, np.int32)
    assert live_blocks.count_pairs(end, 8, 16).live[0] == live_blocks.most_pairs(LENGTH, 8, 16)


def test_sixty_four_thousand_causal_tokens_do_not_overflow() -> None:
    length = 65536
    end = np.full((1, length), length, np.int32)
    for counts in (f(end) for f in (_count, lambda x: _count(jnp.asarray(x)))):
        assert int(counts.token_pairs[0]) == length * (length + 1) // 2
        assert int(counts.live[0]) == 128 * 129 // 2


def _count(end: np.ndarray) -> live_blocks.Counts:
    return live_blocks.count_pairs(end, 512, 512)


def test_work_is_that_of_the_separate_sequences() -> None:
    """Sixteen sequences of one block each: only the diagonal is live."""
    end = np.repeat(np.arange(1, 17) * 8, 8).astype(np.int32)
    np.testing.assert_array_equal(live_blocks.live_blocks(end, 8, 8), np.eye(16, dtype=bool))


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="blocks that divide 60 tokens"):
        live_blocks.count_pairs(np.arange(60, dtype=np.int32) + 1, 8, 8)
    with pytest.raises(ValueError, match="at most 92681 tokens"):
        live_blocks.count_pairs(np.arange(1 << 17, dtype=np.int32) + 1, 512, 512)
    with pytest.raises(ValueError, match="larger blocks or fewer rows"):
        live_blocks.list_pairs(jnp.ones((2, 16384), jnp.int32), 1, 16384, hold_queries=True)

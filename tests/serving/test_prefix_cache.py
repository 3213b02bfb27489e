"""The radix tree of pages against its slow twin: a list of everything that was ever kept."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.serving.prefix_cache import PrefixCache

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=12)


def shared(one: list[int], other: list[int]) -> int:
    """Length of the common prefix, counted one by one."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class Pool:
    """A cache with a pool that holds the tokens themselves in place of keys and values."""

    def __init__(self, pages: int, page_tok: int) -> None:
        self.cache = PrefixCache(pages, page_tok)
        self.content = np.full((pages, page_tok), -1, np.int32)

    def keep(self, tokens: list[int]) -> None:
        ids = np.asarray(tokens, np.int32)
        keep = self.cache.keep(ids)
        size = self.cache.page_tok
        for number, page in enumerate(keep.pages, start=keep.first_page):
            part = ids[number * size : (number + 1) * size]
            self.content[page] = -1
            self.content[page, : part.size] = part

    def read(self, prompt: list[int]) -> list[int]:
        hit = self.cache.find(np.asarray(prompt, np.int32))
        pages = self.content[list(hit.pages)].reshape(-1) if hit.pages else self.content[0][:0]
        return pages[: hit.prefix_tok].tolist()


@given(SEQUENCES, st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 4))
def test_a_large_pool_finds_the_longest_prefix_that_was_kept(
    kept: list[list[int]], prompt: list[int], page_tok: int
) -> None:
    pool = Pool(400, page_tok)
    for tokens in kept:
        pool.keep(tokens)
    longest = max((shared(k, prompt) for k in kept), default=0)
    assert pool.read(prompt) == prompt[:longest]


@given(SEQUENCES, SEQUENCES, st.integers(1, 4), st.integers(1, 6))
def test_a_small_pool_never_lies(
    kept: list[list[int]], prompts: list[list[int]], page_tok: int, pages: int
) -> None:
    pool = Pool(pages, page_tok)
    for index, tokens in enumerate(kept):
        pool.keep(tokens)
        assert pool.cache.used_pages <= pages
        for prompt in prompts[: index + 1]:
            found = pool.read(prompt)
            assert found == prompt[: len(found)]


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = Pool(3, 2)
    pool.keep([1, 1, 1, 1])
    pool.keep([2, 2])
    assert pool.read([1, 1, 1, 1]) == [1, 1, 1, 1]  # used again: [2, 2] is the oldest now
    pool.keep([3, 3])
    assert pool.read([2, 2]) == [] and pool.read([1, 1, 1, 1]) == [1, 1, 1, 1]
    assert pool.cache.evicted == 1


def test_new_weights_empty_it() -> None:
    pool = Pool(3, 2)
    pool.keep([1, 1, 1, 1])
    pool.cache.forget()
    assert pool.read([1, 1]) == [] and pool.cache.used_pages == 0

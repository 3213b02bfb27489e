"""The store of prompts against its slow twin: plain arrays and pairwise comparison."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.proxy.ledger import longest_shared
from clawgym_jax.proxy.prompt_store import PromptStore

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=12)


@given(PROMPTS, st.sets(st.integers(0, 11)))
def test_store_equals_plain_arrays(prompts: list[list[int]], removed: set[int]) -> None:
    store = PromptStore()
    kept: dict[int, np.ndarray] = {}
    for number, tokens in enumerate(prompts):
        ids = np.asarray(tokens, np.int32)
        assert store.add(number, ids) == longest_shared(ids, list(kept.values()))
        kept[number] = ids
        if number in removed:
            store.remove(number)
            del kept[number]
    for number, ids in kept.items():
        assert np.array_equal(store.get(number), ids)
    prefixes = {tuple(ids[: end + 1]) for ids in kept.values() for end in range(ids.size)}
    assert store.held_tok == len(prefixes)  # every shared stretch once, nothing left behind


def test_a_growing_history_is_held_once() -> None:
    store = PromptStore()
    history = np.arange(20_000, dtype=np.int32)
    for number in range(200):
        assert store.add(number, history) == (0 if number == 0 else history.size - 100)
        history = np.concatenate([history, np.arange(100, dtype=np.int32)])
    assert store.held_tok == 20_000 + 199 * 100

"""The tree keeps every call whole, merges what may merge and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.types import CallRecord, Span
from clawgym_jax.tree.filters import DEAD_LEAF, FilterConfig, select_calls
from clawgym_jax.tree.flatten import NO_PRED, flatten
from clawgym_jax.tree.prefix_tree import CONTEXT, ROOT, PrefixTree, build_tree
from tests.tree.counting import Comparisons
from tests.tree.histories import make_call, random_rollout
from tests.tree.naive import labels_of, prefixes


@given(st.integers(0, 10**6))
def test_every_call_reads_back_and_no_segment_is_doubled(seed: int) -> None:
    calls = random_rollout(seed)
    tree = build_tree(calls)
    for i, call in enumerate(calls):
        expected = np.concatenate([call.prompt_ids, call.completion.ids])
        np.testing.assert_array_equal(tree.tokens_of(i), expected)
        assert tree.segments[tree.sampled[i]].call == i
    for segment in tree.segments:
        firsts = [
            int(tree.segments[c].tokens[0])
            for c in segment.children
            if tree.segments[c].call == CONTEXT
        ]
        assert len(firsts) == len(set(firsts)), "two context children begin alike"
    assert tree.total_tok == sum(len(s.tokens) for s in tree.segments)


@given(st.integers(0, 10**6))
def test_a_tree_is_the_set_of_its_calls_labelled_prefixes(seed: int) -> None:
    calls = random_rollout(seed, vocab=2)
    tree, labels = build_tree(calls), labels_of(calls)
    assert tree.total_tok == len(prefixes(labels))
    for i, call in enumerate(calls):
        read: list[tuple[int, str | None]] = []
        for segment in (tree.segments[s] for s in tree.path(tree.sampled[i])):
            owner = None if segment.call == CONTEXT else calls[segment.call].call_id
            assert segment.depth == len(read)
            read += [(t, owner) for t in segment.tokens.tolist()]
        assert read == labels[i]
        through = dict.fromkeys(owner for _, owner in labels[i][: call.prompt_tok] if owner)
        assert [calls[j].call_id for j in tree.extends[i]] == list(through)


@given(st.integers(0, 10**6))
def test_first_is_the_call_that_brought_the_tokens_also_after_splits(seed: int) -> None:
    calls = random_rollout(seed, vocab=3)
    tree, labels = build_tree(calls), labels_of(calls)
    brought: dict[tuple[tuple[int, str | None], ...], int] = {}
    for i, path in enumerate(labels):
        for prefix in prefixes([path]):
            brought.setdefault(prefix, i)
    for i, path in enumerate(labels):
        for segment in (tree.segments[s] for s in tree.path(tree.sampled[i])):
            for depth in range(segment.depth, segment.end_depth):
                assert segment.first == brought[tuple(path[: depth + 1])]


@given(st.integers(0, 10**6))
def test_children_know_their_places(seed: int) -> None:
    tree = build_tree(random_rollout(seed))
    for index, segment in enumerate(tree.segments):
        assert [tree.segments[c].slot for c in segment.children] == list(
            range(len(segment.children))
        )
        assert all(tree.segments[c].parent == index for c in segment.children)
        context = [c for c in segment.children if tree.segments[c].call == CONTEXT]
        assert {int(tree.segments[c].tokens[0]): c for c in context} == segment.contexts
    assert sorted(tree.depth_first()) == list(range(1, len(tree.segments)))


def long_episode(calls: int, new_tok: int, sampled_tok: int) -> list[CallRecord]:
    """A conversation that only grows, each call with new_tok of environment text."""
    rng = np.random.default_rng(0)
    made: list[CallRecord] = []
    prompt = np.zeros(0, np.int32)
    for ordinal in range(calls):
        prompt = np.concatenate([prompt, rng.integers(0, 999, new_tok, dtype=np.int32)])
        ids = rng.integers(0, 999, sampled_tok, dtype=np.int32)
        made.append(make_call(ordinal, prompt, ids))
        prompt = np.concatenate([prompt, ids])
    return made


def test_a_long_episode_is_held_once_and_its_prompts_can_go() -> None:
    """200 calls up to 64K tokens of context: 6.5 million prompt tokens, 64 thousand different."""
    calls = long_episode(200, 240, 80)
    tree = build_tree(calls)
    held = {id(b): b for b in (_owner(s.tokens) for s in tree.segments)}
    assert tree.total_tok == 64_000 == sum(b.size for b in held.values())
    assert not any(
        np.shares_memory(base, call.prompt_ids) for base in held.values() for call in calls[::50]
    )


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_splits_hold_no_token_twice() -> None:
    rng = np.random.default_rng(1)
    calls = [make_call(i, np.r_[np.arange(9000 - 100 * i), -1 - i], [i]) for i in range(60)]
    rng.shuffle(calls)  # type: ignore[arg-type]
    tree = build_tree(calls)
    held = {id(b): b for b in (_owner(s.tokens) for s in tree.segments)}
    assert tree.total_tok == 9000 + 2 * 60 == sum(b.size for b in held.values())


def test_each_call_compares_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = long_episode(50, 24, 8)
    comparisons = Comparisons(monkeypatch)
    build_tree(calls)
    known = sum(call.prompt_tok - 24 for call in calls)
    assert comparisons.compared_tok == known
    assert comparisons.count == sum(2 * i for i in range(50))  # once for each segment on its way


def test_a_wide_node_costs_no_more_than_a_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of calls below one prompt: other texts behind it, and retries that begin alike."""
    texts = [make_call(i, [1, 2, 1000 + i, 3], [4]) for i in range(1000)]
    retries = [make_call(1000 + i, [1, 2], [7, i]) for i in range(1000)]
    later = [
        make_call(2000 + i, [1, 2, 7, i, 5], [6], (Span(2, 2, f"e.{1000 + i}"),))
        for i in range(1000)
    ]
    comparisons = Comparisons(monkeypatch)
    tree = build_tree([*texts, *retries, *later])
    assert [tree.extends[2000 + i] for i in range(1000)] == [(1000 + i,) for i in range(1000)]
    assert comparisons.count <= 2 * 3000
    assert tree.segments[ROOT].contexts.keys() == {1}


@given(st.integers(0, 10**6))
def test_flat_arrays_give_each_token_exactly_its_path(seed: int) -> None:
    calls = random_rollout(seed)
    tree = build_tree(calls)
    flat = flatten(tree)
    n = len(flat.tokens)
    sees = (np.arange(n)[None, :] <= np.arange(n)[:, None]) & (
        np.arange(n)[:, None] < flat.end[None, :]
    )
    assert len(flat.target) == sum(c.completion_tok for c in calls)
    np.testing.assert_array_equal(sees.sum(1) - 1, flat.position)
    for k in range(len(flat.target)):
        call = calls[flat.call[k]]
        full = np.concatenate([call.prompt_ids, call.completion.ids])
        path = flat.tokens[np.nonzero(sees[flat.target[k]])[0]]
        np.testing.assert_array_equal(path, full[: call.prompt_tok + flat.offset[k] + 1])
        on_path = np.nonzero(sees[flat.target[k]])[0]
        assert flat.pred[k] == (on_path[-2] if len(on_path) > 1 else NO_PRED)


def test_equal_samples_of_a_retry_stay_two_samples() -> None:
    a = make_call(0, [1, 2], [7, 8])
    b = make_call(1, [1, 2], [7, 8])
    after_b = make_call(2, [1, 2, 7, 8, 3], [9], (Span(2, 2, "e.1"),), continues=("e.1",))
    tree = build_tree([a, b, after_b])
    assert tree.sampled[0] != tree.sampled[1]
    assert tree.extends[2] == (1,)
    selection = select_calls([a, b, after_b], FilterConfig())
    assert selection.dropped == {0: DEAD_LEAF}


def test_a_turn_behind_changed_context_is_context_there_and_its_leaf_is_not_dead() -> None:
    first = make_call(0, [1, 2, 9], [7, 8])  # 9: a tail that the next call takes away
    second = make_call(1, [1, 2, 7, 8, 4, 9], [6], (Span(2, 2, "e.0"),), continues=("e.0",))
    selection = select_calls([first, second], FilterConfig(max_leaves=1))
    assert selection.kept == (0, 1)
    assert selection.leaves == 1
    assert len(flatten(selection.tree).target) == 3


def test_a_call_is_added_once() -> None:
    tree = PrefixTree()
    tree.add(make_call(0, [1], [2]))
    with pytest.raises(RecordError, match="added twice"):
        tree.add(make_call(0, [1], [2]))

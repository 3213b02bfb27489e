"""The tree keeps every call whole, merges what may merge and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError, RecordError
from clawgym_jax.core.types import Role, Span
from clawgym_jax.tree.filters import DEAD_LEAF, OVER_BRANCHING, FilterConfig, select_calls
from clawgym_jax.tree.flatten import NO_PRED, flatten
from clawgym_jax.tree.pack import PackConfig, pack
from clawgym_jax.tree.prefix_tree import CONTEXT, PrefixTree, build_tree
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)


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


def test_auxiliary_calls_and_over_branching() -> None:
    calls = [make_call(i, [1, 2], [i]) for i in range(4)]
    assert set(select_calls(calls, FilterConfig(max_leaves=3)).dropped.values()) <= {
        DEAD_LEAF,
        OVER_BRANCHING,
    }
    assert select_calls(calls, FilterConfig(max_leaves=3)).kept == ()
    calls.append(make_call(4, [5, 5], [1], role=Role.SUBAGENT, chain="sub"))
    selection = select_calls(calls, FilterConfig())
    assert selection.dropped[4] == "auxiliary call: sub-agent"
    assert selection.kept == (3,)


def test_the_main_leaf_before_a_compaction_stays() -> None:
    main = make_call(0, [1, 2], [3])
    compaction = make_call(1, [1, 2, 3, 8], [5], role=Role.COMPACTION)
    after = make_call(2, [1, 6], [4])
    assert select_calls([main, compaction, after], FilterConfig()).kept == (0, 2)


def test_a_call_is_added_once() -> None:
    tree = PrefixTree()
    tree.add(make_call(0, [1], [2]))
    with pytest.raises(RecordError, match="added twice"):
        tree.add(make_call(0, [1], [2]))


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([70, 90, 200]))
def test_packing_holds_every_trainable_token_once(seed: int, share: bool, row_tok: int) -> None:
    rollouts = [random_rollout(seed + i, episode=f"e{i}") for i in range(4)]
    selections = [select_calls(calls, KEEP_ALL) for calls in rollouts]
    rows = pack(selections, PackConfig(row_tok=row_tok, train_tok=64, share_context=share))
    seen: dict[tuple[str, int], int] = {}
    for r, k in zip(*np.nonzero(rows.mask), strict=True):
        call = rows.calls[rows.call[r, k]]
        assert call in rollouts[rows.rollout[r, k]]
        seen[call.call_id, int(rows.offset[r, k])] = 1 + seen.get(
            (call.call_id, int(rows.offset[r, k])), 0
        )
        i = rows.target[r, k]
        sees = (np.arange(row_tok) <= i) & (i < rows.end[r])
        path = rows.tokens[r][sees]
        full = np.concatenate([call.prompt_ids, call.completion.ids])
        np.testing.assert_array_equal(path, full[: call.prompt_tok + rows.offset[r, k] + 1])
        assert rows.pred[r, k] == np.nonzero(sees)[0][-2]
    assert set(seen.values()) == {1}
    assert len(seen) == sum(c.completion_tok for calls in rollouts for c in calls)
    assert rows.padding_tok >= 0
    assert rows.repeated_tok >= 0


def test_a_call_longer_than_a_row_is_an_error_that_says_what_to_raise() -> None:
    selection = select_calls([make_call(0, [1] * 50, [2])], KEEP_ALL)
    with pytest.raises(ConfigError, match="row_tok=32"):
        pack([selection], PackConfig(row_tok=32, train_tok=8))


def test_siblings_share_their_prompt_in_a_row() -> None:
    root = tuple(range(100, 150))
    rollouts = [[make_call(0, [*root, i], [1, 2], episode=f"e{i}")] for i in range(8)]
    selections = [select_calls(calls, KEEP_ALL) for calls in rollouts]
    rows = pack(selections, PackConfig(row_tok=128, train_tok=64))
    assert rows.tokens.shape[0] == 1
    assert rows.unique_tok == 50 + 8 * 3
    assert rows.linear_tok == 8 * 53

"""Kept calls by tokens and by turns: by hand, and against the definitions written down plainly."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.batch.call_tree import rollout_calls, token_paths, turn_order
from clawgym_jax.core.types import CallRecord, Role, Span
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from experiments.bench.tree_parts.structure import expand, stored
from tests.batch.episodes import forked_calls, presented_again
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
SEEDS = st.integers(0, 10**6)
START: tuple[int, ...] = ()


def chain_with_a_helper() -> list[CallRecord]:
    """main - helper - main: the second main call runs through the helper's tokens."""
    first, second = Span(1, 1, "e.0"), Span(3, 1, "e.1")
    return [
        make_call(0, [1], [2]),
        make_call(1, [1, 2, 3], [4], (first,), role=Role.SUBAGENT),
        make_call(2, [1, 2, 3, 4, 5], [6], (first, second)),
    ]


def test_a_fork() -> None:
    selection = select_calls(forked_calls("e"), KEEP_ALL)
    assert token_paths(selection) == (3, 1, 1, 1)
    assert turn_order(selection) == ((START, (0,), (0,), (0,)), (3, 1, 1, 1))


def test_a_dropped_call_between_two_kept_ones_is_no_node() -> None:
    calls = chain_with_a_helper()
    everyone = select_calls(calls, KEEP_ALL)
    assert turn_order(everyone) == ((START, (0,), (1,)), (1, 1, 1))
    selection = select_calls(calls, FilterConfig())
    assert selection.kept == (0, 2)
    assert turn_order(selection) == ((START, (0,)), (1, 1))
    assert token_paths(selection) == (1, 1)
    assert rollout_calls(selection, 0.5).call_ids == ("e.0", "e.2")


def test_turns_behind_changed_context_go_on_in_time_but_not_in_tokens() -> None:
    """A moving tail: no prompt starts with an earlier one, each presents all turns before it."""
    selection = select_calls(presented_again([(), (0,), (0, 1), (0, 1, 2)]), FilterConfig())
    assert selection.tree.extends == [()] * 4 and selection.leaves == 1
    assert token_paths(selection) == (1, 1, 1, 1)
    assert turn_order(selection) == ((START, (0,), (1,), (2,)), (1, 1, 1, 1))


@pytest.mark.parametrize(("name", "paths_tok"), [("openclaw", 1), ("openclaw_completions", 10)])
def test_recorded_rollouts_are_chains_in_time(name: str, paths_tok: int) -> None:
    """Eight rollouts of ten calls each; over chat completions OpenClaw moves the tail each time."""
    for calls in expand(stored(name), thin=8):
        selection = select_calls(calls, FilterConfig())
        before, ends = turn_order(selection)
        assert before == (START, *((i,) for i in range(9))) and ends == (1,) * 10
        inner = {a for i in selection.kept for a in selection.tree.extends[i]}
        assert len(selection.kept) - len(inner) == paths_tok


def test_two_continuations_are_a_branch() -> None:
    """1 and 3 both go on from 0; 2 from 1. Nothing continues 2 and 3."""
    selection = select_calls(presented_again([(), (0,), (0, 1), (0,)]), KEEP_ALL)
    assert turn_order(selection) == ((START, (0,), (1,), (0,)), (2, 1, 1, 1))
    assert token_paths(selection) == (1, 1, 1, 1)


def test_merged_turns_both_lead_to_the_call_that_presents_them() -> None:
    """1 and 2 answer the same (a cut connection); 3 presents both: one end, counted once."""
    selection = select_calls(presented_again([(), (0,), (0,), (0, 1, 2)]), KEEP_ALL)
    assert turn_order(selection) == ((START, (0,), (0,), (2, 1)), (1, 1, 1, 1))


def test_an_extension_and_a_continuation_mix() -> None:
    """1 extends 0; 2 continues both; 3 extends 2, whose prompt holds the turns as context."""
    calls = [
        make_call(0, [1], [2]),
        make_call(1, [1, 2, 3], [4], (Span(1, 1, "e.0"),), continues=("e.0",)),
        make_call(2, [9, 2, 3, 4, 5], [6], continues=("e.0", "e.1")),
        make_call(3, [9, 2, 3, 4, 5, 6, 7], [8], (Span(5, 1, "e.2"),), continues=("e.2",)),
    ]
    selection = select_calls(calls, KEEP_ALL)
    assert selection.tree.extends == [(), (0,), (), (2,)]
    assert turn_order(selection) == ((START, (0,), (1,), (2,)), (1, 1, 1, 1))
    assert token_paths(selection) == (1, 1, 1, 1)


def test_time_goes_on_through_a_summary_that_is_not_trained() -> None:
    """The compaction presents 0 and 1, the call after it the summary only."""
    calls = presented_again([(), (0,), (0, 1), (2,)])
    calls[2] = dataclasses.replace(calls[2], role=Role.COMPACTION)
    selection = select_calls(calls, FilterConfig())
    assert selection.kept == (0, 1, 3)
    assert turn_order(selection) == ((START, (0,), (1,)), (1, 1, 1))
    anew = [*calls[:3], dataclasses.replace(calls[3], continues=())]
    assert turn_order(select_calls(anew, FilterConfig())) == ((START, (0,), START), (1, 1, 1))


def test_turns_of_calls_that_are_not_there_are_passed_over() -> None:
    lost = [make_call(0, [1], [2]), make_call(1, [5], [6], continues=("gone", "e.0"))]
    assert turn_order(select_calls(lost, KEEP_ALL)) == ((START, (0,)), (1, 1))


def ancestors(selection: Selection) -> dict[int, set[int]]:
    """Kept call -> all kept calls that it comes after, by following histories to their end."""
    tree = selection.tree
    told = [
        {j for j in range(i) if j in tree.extends[i] or tree.calls[j].call_id in call.continues}
        for i, call in enumerate(tree.calls)
    ]

    def follow(i: int) -> set[int]:
        return told[i].union(*(follow(j) for j in told[i]))

    return {i: follow(i) & set(selection.kept) for i in selection.kept}


@given(SEEDS, st.booleans())
def test_the_order_is_that_of_histories(seed: int, drop: bool) -> None:
    selection = select_calls(random_rollout(seed), FilterConfig() if drop else KEEP_ALL)
    above, kept = ancestors(selection), selection.kept
    before, ends = turn_order(selection)
    for i, calls in zip(kept, before, strict=True):
        nearest = {j for j in above[i] if not any(j in above[k] for k in above[i])}
        assert {kept[j] for j in calls} == nearest
    last = [i for i in kept if not any(i in above[k] for k in kept)]
    assert ends == tuple(sum(e == i or i in above[e] for e in last) for i in kept)


@given(SEEDS, st.booleans())
def test_paths_are_those_of_the_token_tree(seed: int, drop: bool) -> None:
    """A call lies below another if its prompt's path runs through the other's own segment."""
    selection = select_calls(random_rollout(seed), FilterConfig() if drop else KEEP_ALL)
    tree, kept = selection.tree, selection.kept
    above = {i: {j for j in kept if tree.sampled[j] in tree.path(tree.prompt_end[i])} for i in kept}
    leaves = [i for i in kept if not any(i in above[k] for k in kept)]
    expected = tuple(sum(e == i or i in above[e] for e in leaves) for i in kept)
    assert token_paths(selection) == expected
    whole = ancestors(selection)
    assert all(above[i] <= whole[i] for i in kept)  # what extends also comes after

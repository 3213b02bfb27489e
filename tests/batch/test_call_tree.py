"""Kept calls as a tree: nearest kept ancestor, leaves below; against the token tree."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.batch.call_tree import NO_PARENT, rollout_calls, tree_of_calls
from clawgym_jax.core.types import CallRecord, Role, Span
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from tests.batch.episodes import forked_calls
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
SEEDS = st.integers(0, 10**6)


def chain_with_a_helper() -> list[CallRecord]:
    """main - helper - main: the second main call runs through the helper's tokens."""
    first, second = Span(1, 1, "e.0"), Span(3, 1, "e.1")
    return [
        make_call(0, [1], [2]),
        make_call(1, [1, 2, 3], [4], (first,), role=Role.SUBAGENT),
        make_call(2, [1, 2, 3, 4, 5], [6], (first, second)),
    ]


def test_a_fork() -> None:
    assert tree_of_calls(select_calls(forked_calls("e"), KEEP_ALL)) == (
        (NO_PARENT, 0, 0, 0),
        (3, 1, 1, 1),
    )


def test_a_dropped_call_between_two_kept_ones_is_no_node() -> None:
    calls = chain_with_a_helper()
    assert tree_of_calls(select_calls(calls, KEEP_ALL)) == ((NO_PARENT, 0, 1), (1, 1, 1))
    selection = select_calls(calls, FilterConfig())
    assert selection.kept == (0, 2)
    assert tree_of_calls(selection) == ((NO_PARENT, 0), (1, 1))
    assert rollout_calls(selection, 0.5).call_ids == ("e.0", "e.2")


def test_a_turn_behind_changed_context_starts_anew() -> None:
    """*continues* is no edge: the state that the turn was sampled in is another one."""
    calls = [
        make_call(0, [1, 2], [3]),
        make_call(1, [1, 9, 3, 4], [5], (Span(2, 1, "e.0"),), continues=("e.0",)),
    ]
    assert tree_of_calls(select_calls(calls, KEEP_ALL)) == ((NO_PARENT, NO_PARENT), (1, 1))


def starts_with(longer: Selection, call: int, of: int) -> bool:
    """Whether a call's prompt path runs through another call's own segment, token tree alone."""
    tree = longer.tree
    return tree.sampled[of] in tree.path(tree.prompt_end[call])


@given(SEEDS, st.booleans())
def test_parents_by_the_token_tree(seed: int, drop: bool) -> None:
    selection = select_calls(random_rollout(seed), FilterConfig() if drop else KEEP_ALL)
    parents, leaves = tree_of_calls(selection)
    above = [
        [j for j, other in enumerate(selection.kept) if starts_with(selection, call, other)]
        for call in selection.kept
    ]
    for i, own in enumerate(above):
        deepest = max(own, key=lambda j: len(above[j]), default=NO_PARENT)
        assert parents[i] == deepest
    tips = [i for i in range(len(above)) if not any(i in own for own in above)]
    assert leaves == tuple(sum(t == i or i in above[t] for t in tips) for i in range(len(above)))
    assert sum(n for n, p in zip(leaves, parents, strict=True) if p == NO_PARENT) == len(tips)


@given(SEEDS)
def test_a_child_begins_with_its_parents_tokens(seed: int) -> None:
    selection = select_calls(random_rollout(seed), KEEP_ALL)
    parents, _ = tree_of_calls(selection)
    calls = [selection.tree.calls[i] for i in selection.kept]
    for call, parent in zip(calls, parents, strict=True):
        if parent != NO_PARENT:
            ids = np.concatenate([calls[parent].prompt_ids, calls[parent].completion.ids])
            np.testing.assert_array_equal(call.prompt_ids[: len(ids)], ids)

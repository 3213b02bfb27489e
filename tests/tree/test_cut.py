"""Cuts repeat as little as any cuts can."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import RecordError
from clawgym_jax.tree.cut import best_cuts, cut_forest
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.forest import Forest
from clawgym_jax.tree.prefix_tree import PrefixTree, build_tree
from tests.tree.histories import make_call, random_rollout
from tests.tree.naive import Label, labels_of, prefixes

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)


def grafted(tree: PrefixTree, kept: Sequence[int]) -> Forest:
    forest = Forest()
    for call in kept:
        forest.graft(tree, call, 0)
    return forest


def all_cuts(count: int) -> Iterator[list[int]]:
    for inner in itertools.product([False, True], repeat=count - 1):
        yield [0, *(i + 1 for i, cut in enumerate(inner) if cut), count]


def depth_first(forest: Forest) -> list[int]:
    order = forest.depth_first()
    return sorted(range(len(forest.calls)), key=lambda call: order.index(forest.sampled[call]))


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(5, 15), st.booleans())
def test_no_cuts_repeat_less(seed: int, spare: int, train_tok: int, everything: bool) -> None:
    """Against all ways to cut the same order, their sizes counted as sets of prefixes."""
    calls = random_rollout(seed, vocab=2, calls=8, max_prompt=25)
    selection = select_calls(calls, KEEP_ALL if everything else FilterConfig())
    row_tok = spare + max(c.prompt_tok + c.completion_tok for c in calls)
    forest = grafted(selection.tree, selection.kept)
    labels = labels_of(calls)
    order = [forest.number[call] for call in depth_first(forest)]

    def size(part: Sequence[int]) -> int:
        return len(prefixes([labels[i] for i in part]))

    best: tuple[int, int] | None = None
    for borders in all_cuts(len(order)):
        parts = [order[a:b] for a, b in itertools.pairwise(borders)]
        sizes = [size(part) for part in parts]
        if max(sizes) <= row_tok and all(
            sum(calls[i].completion_tok for i in part) <= train_tok for part in parts
        ):
            best = min(best or (10**9, 0), (sum(sizes), len(parts)))
    pieces = cut_forest(forest, 0, row_tok, train_tok)
    assert (sum(p.tree_tok for p in pieces), len(pieces)) == best
    assert sorted(i for p in pieces for i in p.calls) == list(selection.kept)
    assert all(p.tree_tok == size(p.calls) for p in pieces)
    held = [prefixes([labels[i] for i in p.calls]) for p in pieces]
    for piece, own in zip(pieces, held, strict=True):
        others = set().union(*(other for other in held if other is not own))
        assert piece.own_tok == len(own - others)


def test_what_fits_is_not_cut() -> None:
    assert best_cuts([5, 6, 7], [0, 5, 0], [1, 1, 1], 13, 3) == [0, 3]
    assert best_cuts([5, 6, 7], [0, 5, 0], [1, 1, 1], 12, 3) == [0, 2, 3]
    assert best_cuts([5, 6, 7], [0, 5, 0], [1, 1, 1], 13, 2) == [0, 2, 3]
    assert best_cuts([], [], [], 5, 5) == [0]


def test_the_cut_is_where_least_is_shared_not_where_the_row_is_full() -> None:
    """Filling rows in order would cut between the last two, which share ten tokens."""
    assert best_cuts([12, 12, 14], [0, 2, 10], [1, 1, 1], 25, 9) == [0, 1, 3]


@given(st.integers(0, 10**6))
def test_a_forest_of_all_calls_of_a_rollout_is_its_tree(seed: int) -> None:
    calls = random_rollout(seed, vocab=2)
    tree = build_tree(calls)
    forest = grafted(tree, range(len(calls)))
    assert forest.total_tok == tree.total_tok
    for i in range(len(calls)):
        assert forest.tokens_of(i).tolist() == tree.tokens_of(i).tolist()


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_forest_of_some_calls_is_the_set_of_their_prefixes(seed: int, count: int) -> None:
    forest = Forest()
    paths: list[list[Label]] = []
    for rollout in range(count):
        calls = random_rollout(seed + rollout, f"e{rollout}", vocab=2)
        tree, labels = build_tree(calls), labels_of(calls)
        for i in range(rollout % 2, len(calls), 2):
            forest.graft(tree, i, rollout)
            paths.append(labels[i])
    assert forest.total_tok == len(prefixes(paths))
    for i, path in enumerate(paths):
        assert forest.tokens_of(i).tolist() == [t for t, _ in path]


def test_calls_are_grafted_once_and_in_order() -> None:
    first = make_call(0, [1], [2])
    tree = build_tree([first, make_call(1, [1, 2, 3], [4]), make_call(2, [1, 2, 3, 4, 5], [])])
    forest = Forest()
    forest.graft(tree, 1, 0)
    for call in (1, 0, 2):  # again; the turn that is context already; nothing sampled
        with pytest.raises(RecordError, match="once, in the order of sampling"):
            forest.graft(tree, call, 0)
    assert forest.graft(tree, 0, 1) == 1  # the same tree as another rollout's

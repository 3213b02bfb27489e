"""Rollouts in pieces that fit a row, with the fewest ancestors repeated.

The calls of a rollout stand in depth-first order, so that neighbours share most: the tokens of some
consecutive calls are the path of the first and, of every other, what its path does not share with
its neighbour's. A cut between two neighbours repeats what they share, no more and no less; a
dynamic programme places the cuts. Its twin in the tests tries all cuts.
Not here: which pieces share a row (`assign`).
Invariant: every call of a forest is in exactly one piece; every piece fits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.forest import Forest
from clawgym_jax.tree.segments import ROOT


@dataclass(frozen=True, slots=True)
class Piece:
    """Some calls of one rollout that go into one row together."""

    forest: int  # which forest they share context in
    rollout: int
    calls: tuple[int, ...]  # numbers in the rollout's own tree, in the order of sampling
    tree_tok: int
    train_tok: int
    shared: dict[int, int]  # segments of the forest that other pieces hold as well -> their tokens

    @property
    def own_tok(self) -> int:
        """Tokens that no other piece has."""
        return self.tree_tok - sum(self.shared.values())


def cut_forest(forest: Forest, number: int, row_tok: int, train_tok: int) -> list[Piece]:
    """The pieces of every rollout of a forest, its calls being all that are packed."""
    rank = {segment: i for i, segment in enumerate(forest.depth_first())}
    members: dict[int, list[int]] = {}
    for call in sorted(range(len(forest.calls)), key=lambda call: rank[forest.sampled[call]]):
        members.setdefault(forest.rollout[call], []).append(call)
    parts = [
        (rollout, part)
        for rollout, calls in sorted(members.items())
        for part in _cut_rollout(forest, calls, row_tok, train_tok)
    ]
    held = [_segments(forest, part) for _, part in parts]
    holders = Counter(segment for segments in held for segment in segments)
    size = {s: len(forest.segments[s].tokens) for s in holders}
    return [
        Piece(
            number,
            rollout,
            tuple(sorted(forest.number[call] for call in part)),
            sum(size[s] for s in segments),
            sum(forest.calls[call].completion_tok for call in part),
            {s: size[s] for s in segments if holders[s] > 1},
        )
        for (rollout, part), segments in zip(parts, held, strict=True)
    ]


def _cut_rollout(
    forest: Forest, calls: Sequence[int], row_tok: int, train_tok: int
) -> list[list[int]]:
    """calls: of one rollout, depth-first."""
    for call in calls:
        _check_alone(forest.calls[call], row_tok, train_tok)
    ends = [forest.sampled[call] for call in calls]
    borders = best_cuts(
        [forest.segments[end].end_depth for end in ends],
        [0, *(_common_tok(forest, a, b) for a, b in itertools.pairwise(ends))],
        [forest.calls[call].completion_tok for call in calls],
        row_tok,
        train_tok,
    )
    return [list(calls[a:b]) for a, b in itertools.pairwise(borders)]


def best_cuts(
    length: Sequence[int],
    shared: Sequence[int],
    trained: Sequence[int],
    row_tok: int,
    train_tok: int,
) -> list[int]:
    """Borders 0 = b_0 < b_1 < ... < b_m = n of the pieces that repeat the fewest tokens.

    length[i]: tokens of call i's path; shared[i]: how many of them it has in common with call i - 1
    (shared[0] unused); trained[i]: tokens that it sampled. Each call fits a row on its own. Among
    equals, the fewest pieces. Time: n times the calls of a row.
    """
    new = [n - s for n, s in zip(length, shared, strict=True)]
    if length and length[0] + sum(new[1:]) <= row_tok and sum(trained) <= train_tok:
        return [0, len(length)]
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # tokens, pieces, start of the last piece
    for stop in range(1, len(length) + 1):
        options, behind, train = [], 0, 0
        for start in range(stop - 1, -1, -1):
            size, train = length[start] + behind, train + trained[start]
            if size > row_tok or train > train_tok:
                break
            options.append((best[start][0] + size, best[start][1] + 1, start))
            behind += new[start]
        best.append(min(options))
    borders = [len(length)]
    while borders[-1]:
        borders.append(best[borders[-1]][2])
    return borders[::-1]


def _common_tok(forest: Forest, a: int, b: int) -> int:
    """Tokens that the paths to two segments have in common."""
    while a != b:
        if b == ROOT or (a != ROOT and forest.segments[a].depth >= forest.segments[b].depth):
            a = forest.segments[a].parent
        else:
            b = forest.segments[b].parent
    return forest.segments[a].end_depth


def _segments(forest: Forest, calls: Iterable[int]) -> list[int]:
    """Every segment on the paths of some calls, once."""
    seen: dict[int, None] = {}
    for call in calls:
        at = forest.sampled[call]
        while at != ROOT and at not in seen:
            seen[at] = None
            at = forest.segments[at].parent
    return list(seen)


def _check_alone(call: CallRecord, row_tok: int, train_tok: int) -> None:
    if call.prompt_tok + call.completion_tok > row_tok or call.completion_tok > train_tok:
        raise ConfigError(
            f"call {call.call_id} has {call.prompt_tok} prompt and {call.completion_tok} sampled "
            f"tokens; rows have row_tok={row_tok}, train_tok={train_tok}: "
            "raise them above the context window"
        )

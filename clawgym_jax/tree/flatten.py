"""A prefix tree as arrays in depth-first order: what tree attention and the loss read.

`end` says it all about attention: token i sees token j iff j <= i < end[j]. Position is the depth
on the path. `pred` of a trainable token is the token before it *on its path*, whose hidden state
scores it. Not here: rows and padding (`pack`).
Invariant: for every token the set {j : j <= i < end[j]} is its path from the root.
Source: mctx-style struct of arrays; the shared definitions ("Positions, pred, values").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clawgym_jax.tree.segments import CONTEXT, ROOT, CallTree

NO_PRED = -1


@dataclass(frozen=True, slots=True)
class FlatTree:
    """N packed tokens, K of them trainable (in depth-first order)."""

    tokens: np.ndarray  # i32[N]
    position: np.ndarray  # i32[N], depth on the path
    end: np.ndarray  # i32[N], exclusive depth-first end of the token's subtree
    first: np.ndarray  # i32[N], number of the call that first computed the token
    target: np.ndarray  # i32[K], where the trainable tokens stand
    pred: np.ndarray  # i32[K], the previous token on the path; NO_PRED at a root
    call: np.ndarray  # i32[K], number of the call that sampled the token
    offset: np.ndarray  # i32[K], index of the token in that call's completion


def flatten(tree: CallTree) -> FlatTree:
    """Depth-first arrays of a tree (or forest: roots are the children of the empty root)."""
    order = tree.depth_first()
    lengths = np.array([len(tree.segments[s].tokens) for s in order], np.int64)
    starts = dict(zip(order, np.concatenate([[0], np.cumsum(lengths)])[:-1].tolist(), strict=True))
    ends = _subtree_ends(tree, order, starts)
    size = int(lengths.sum())
    tokens, position, end, first = (np.zeros(size, np.int32) for _ in range(4))
    trainable: list[tuple[np.ndarray, ...]] = []
    for index in order:
        segment = tree.segments[index]
        start, n = starts[index], len(segment.tokens)
        tokens[start : start + n] = segment.tokens
        position[start : start + n] = np.arange(segment.depth, segment.depth + n)
        end[start : start + n], first[start : start + n] = ends[index], segment.first
        if segment.call != CONTEXT:
            trainable.append(_trainable(tree, index, starts))
    columns = [np.concatenate(c).astype(np.int32) for c in zip(*trainable, strict=True)]
    target, pred, call, offset = columns or [np.zeros(0, np.int32)] * 4
    return FlatTree(tokens, position, end, first, target, pred, call, offset)


def _subtree_ends(tree: CallTree, order: list[int], starts: dict[int, int]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for index in reversed(order):
        segment = tree.segments[index]
        own = starts[index] + len(segment.tokens)
        ends[index] = max([own, *(ends[child] for child in segment.children)])
    return ends


def _trainable(tree: CallTree, index: int, starts: dict[int, int]) -> tuple[np.ndarray, ...]:
    """target, pred, call, offset of one sampled segment."""
    segment = tree.segments[index]
    n = len(segment.tokens)
    target = np.arange(starts[index], starts[index] + n)
    before = NO_PRED
    if segment.parent != ROOT:
        before = starts[segment.parent] + len(tree.segments[segment.parent].tokens) - 1
    pred = np.concatenate([[before], target[:-1]])
    return target, pred, np.full(n, segment.call), np.arange(n)

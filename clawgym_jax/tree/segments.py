"""Segments in a tree: how calls' tokens are held once where they are the same.

Not here: what is the same (`prefix_tree`: within a rollout; `forest`: between rollouts).
Invariant: reading segments from the root to a call's own segment gives prompt_ids + completion ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord

ROOT = 0
CONTEXT = -1


@dataclass(slots=True)
class Segment:
    """A run of tokens without a branch inside."""

    tokens: np.ndarray  # i32[n]; n = 0 only for the root
    call: int  # index of the call that sampled it, CONTEXT for prompt and environment text
    parent: int  # segment index; -1 for the root
    depth: int  # path position of the first token
    first: int  # the call that first computed it: whose prompt brought it, or that sampled it
    slot: int  # its place among the children of its parent
    children: list[int] = field(default_factory=list)
    contexts: dict[int, int] = field(default_factory=dict)  # first token -> context child

    @property
    def end_depth(self) -> int:
        return self.depth + int(self.tokens.shape[0])


class CallTree:
    """Calls are numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.segments = [Segment(np.zeros(0, np.int32), CONTEXT, -1, 0, CONTEXT, 0)]
        self.calls: list[CallRecord] = []
        self.rollout: list[int] = []  # rollout of each call
        self.prompt_end: list[int] = []  # segment in which each call's prompt ends
        self.sampled: list[int] = []  # each call's own segment; -1 if it sampled nothing
        self.total_tok = 0

    def path(self, segment: int) -> list[int]:
        """Segment numbers from below the root down to `segment`."""
        out: list[int] = []
        while segment > ROOT:
            out.append(segment)
            segment = self.segments[segment].parent
        return out[::-1]

    def depth_first(self) -> list[int]:
        """Every segment but the root, parents first, children in the order in which they came."""
        order: list[int] = []
        stack = self.segments[ROOT].children[::-1]
        while stack:
            index = stack.pop()
            order.append(index)
            stack.extend(reversed(self.segments[index].children))
        return order

    def tokens_of(self, index: int) -> np.ndarray:
        """i32[P + C]: the call's prompt and completion, read back from the tree."""
        last = self.sampled[index] if self.sampled[index] >= 0 else self.prompt_end[index]
        parts = [self.segments[s].tokens for s in self.path(last)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _step(self, at: int, tokens: np.ndarray, first: int) -> tuple[int, int]:
        """Goes down one context child of `at`, or grows one; -> (segment, tokens gone)."""
        child = self.segments[at].contexts.get(int(tokens[0]))
        if child is None:  # a copy: a view would keep the whole prompt alive
            grown = self._append(at, tokens.copy(), CONTEXT, first)
            self.segments[at].contexts[int(tokens[0])] = grown
            return grown, len(tokens)
        common = common_prefix(self.segments[child].tokens, tokens)
        return self._split(child, common), common

    def _append(self, parent: int, tokens: np.ndarray, call: int, first: int) -> int:
        index, above = len(self.segments), self.segments[parent]
        slot = len(above.children)
        self.segments.append(Segment(tokens, call, parent, above.end_depth, first, slot))
        above.children.append(index)
        self.total_tok += int(tokens.shape[0])
        return index

    def _split(self, index: int, at: int) -> int:
        """Cuts a context segment after `at` tokens; returns the upper part (maybe all of it).

        The lower part keeps its number, so who ended there still does. Both are views of what the
        tree held before.
        """
        lower = self.segments[index]
        if at == len(lower.tokens):
            return index
        upper = len(self.segments)
        head, tail = lower.tokens[:at], lower.tokens[at:]
        self.segments.append(
            Segment(
                head, CONTEXT, lower.parent, lower.depth, lower.first, lower.slot, [index],
                {int(tail[0]): index},
            )
        )  # fmt: skip
        above = self.segments[lower.parent]
        above.children[lower.slot] = upper
        above.contexts[int(head[0])] = upper
        lower.tokens, lower.parent, lower.depth, lower.slot = tail, upper, lower.depth + at, 0
        return upper

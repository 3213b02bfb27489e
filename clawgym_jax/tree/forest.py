"""Chosen calls of many rollouts as one forest: their paths, as each rollout's own tree has them.

What a token is was settled when its rollout's tree was built: context, or the sample of a certain
call. Two calls share a token here exactly when they agree on all tokens from the root to it and on
what those are. A turn whose call is not in the forest (dropped, in another row) is context in it,
but stays apart from equal text. So how much calls share does not depend on which others are there,
and what a cut costs can be added up beforehand (`cut`).

Not here: which calls go together (`cut`, `pack`). The naive twin is in the tests: sets of prefixes.
Invariant: a forest of all calls of one rollout is that rollout's tree.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.core.errors import RecordError
from clawgym_jax.tree.prefix_tree import PrefixTree
from clawgym_jax.tree.segments import CONTEXT, ROOT, CallTree


class Forest(CallTree):
    """Grows by `graft`. Calls are numbered in the order in which they were grafted."""

    def __init__(self) -> None:
        super().__init__()
        self.number: list[int] = []  # each call's number in the tree of its rollout
        self._placed: dict[tuple[int, int], int] = {}  # (rollout, segment there) -> segment here

    def graft(self, source: PrefixTree, call: int, rollout: int) -> int:
        """Adds a call of a rollout's tree, after the calls of that rollout that came before it.

        Time: the segments of its path that no earlier call of the rollout brought.
        """
        own = source.sampled[call]
        if own < 0 or (rollout, own) in self._placed:
            raise RecordError(
                f"call {source.calls[call].call_id} of rollout {rollout} cannot be grafted: "
                "expected a call with sampled tokens, once, in the order of sampling"
            )
        index = len(self.calls)
        missing, at = [], own
        while at != ROOT and (rollout, at) not in self._placed:
            missing.append(at)
            at = source.segments[at].parent
        here = self._placed[rollout, at] if at != ROOT else ROOT
        for number in reversed(missing):
            segment = source.segments[number]
            if segment.call == CONTEXT:
                here = self._follow(here, segment.tokens, index)
            else:
                here = self._append(
                    here, segment.tokens, index if number == own else CONTEXT, index
                )
            self._placed[rollout, number] = here
        self.calls.append(source.calls[call])
        self.rollout.append(rollout)
        self.number.append(call)
        self.prompt_end.append(self.segments[here].parent)
        self.sampled.append(here)
        return index

    def _follow(self, at: int, tokens: np.ndarray, first: int) -> int:
        """Goes down the context as far as it is known, and grows the rest; -> where it ends."""
        gone = 0
        while gone < len(tokens):
            at, n = self._step(at, tokens[gone:], first)
            gone += n
        return at

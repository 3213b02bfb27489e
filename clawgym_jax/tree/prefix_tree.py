"""A token-level radix tree over model calls; a call is a span on it.

Context tokens (prompts, environment text) merge wherever they are equal from the root on, also
between rollouts; sampled tokens merge by call identity only, so two retries that happen to sample
equal ids stay two samples. A later prompt that begins with an earlier call's prompt and completion
runs *through* that call's sampled tokens; a turn that re-appears behind changed context is context
there and is trained only at its own call.

Not here: which calls are trained (`filters`), some calls of many rollouts (`forest`), array layout
(`flatten`), rows (`pack`).
Invariant: reading segments from the root to a call's own segment gives prompt_ids + completion ids.
Source: ClawGym II, section on prefix trees; design of the shared definitions ("The tree").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord, Span
from clawgym_jax.tree.segments import CONTEXT, ROOT, CallTree

__all__ = ["CONTEXT", "ROOT", "PrefixTree", "build_tree"]


class PrefixTree(CallTree):
    """Grows by `add`. Calls are numbered in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__()
        self.extends: list[tuple[int, ...]] = []  # calls whose sampled tokens a prompt runs through
        self._by_id: dict[str, int] = {}
        # (segment, rollout, first token) -> calls sampled right behind that segment, in order
        self._sampled_at: dict[tuple[int, int, int], list[int]] = {}

    def add(self, call: CallRecord, rollout: int = 0) -> int:
        """Adds one call and returns its number.

        Time: one comparison of the prompt, plus a lookup for each segment on its way; a declared
        splice is found at once, however many calls were sampled there. Memory: the new tokens.
        """
        if call.call_id in self._by_id:
            raise RecordError(f"call {call.call_id} was added twice; call ids are unique in a run")
        index = len(self.calls)
        at, through = self._walk(call, rollout, index)
        own = -1
        if call.completion_tok:
            ids = np.asarray(call.completion.ids, np.int32)
            own = self._append(at, ids, index, index)
            self._sampled_at.setdefault((at, rollout, int(ids[0])), []).append(index)
        self.calls.append(call)
        self.rollout.append(rollout)
        self.prompt_end.append(at)
        self.sampled.append(own)
        self.extends.append(tuple(through))
        self._by_id[call.call_id] = index
        return index

    def _walk(self, call: CallRecord, rollout: int, index: int) -> tuple[int, list[int]]:
        """Follows the prompt as far as the tree has it, grows the rest; -> (segment, calls met)."""
        prompt = np.asarray(call.prompt_ids, np.int32)
        spans = {span.start: span for span in call.spans if span.offset == 0}
        at, i = ROOT, 0
        through: list[int] = []
        while i < len(prompt):
            source = self._sampled_child(at, prompt[i:], spans.get(i), rollout)
            if source is not None:
                at = self.sampled[source]
                through.append(source)
                i += self.segments[at].tokens.shape[0]
            else:
                at, n = self._step(at, prompt[i:], index)
                i += n
        return at, through

    def _sampled_child(
        self, at: int, rest: np.ndarray, span: Span | None, rollout: int
    ) -> int | None:
        """The call below `at` whose whole completion comes next: as spliced, else the latest."""
        candidates: Sequence[int] = self._sampled_at.get((at, rollout, int(rest[0])), ())
        if candidates and span is not None:
            declared = self._by_id.get(span.call_id, -1)
            here = declared >= 0 and self.rollout[declared] == rollout
            candidates = (declared,) if here and self.prompt_end[declared] == at else ()
        for call in reversed(candidates):
            ids = self.calls[call].completion.ids
            if ids.size and common_prefix(ids, rest) == ids.size:
                return call
        return None


def build_tree(calls: Sequence[CallRecord]) -> PrefixTree:
    """The prefix tree of one rollout's calls, in the order in which they were sampled."""
    tree = PrefixTree()
    for call in calls:
        tree.add(call)
    return tree

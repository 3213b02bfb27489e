"""A token-level radix tree over model calls; a call is a span on it.

Context tokens (prompts, environment text) merge wherever they are equal from the root on, also
between rollouts; sampled tokens merge by call identity only, so two retries that happen to sample
equal ids stay two samples. A later prompt that begins with an earlier call's prompt and completion
runs *through* that call's sampled tokens; a turn that re-appears behind changed context is context
there and is trained only at its own call.

Not here: which calls are trained (`filters`), array layout (`flatten`), rows (`pack`).
Invariant: reading segments from the root to a call's own segment gives prompt_ids + completion ids.
Source: ClawGym II, section on prefix trees; design of the shared definitions ("The tree").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord, Span

ROOT = 0
CONTEXT = -1


@dataclass(slots=True)
class Segment:
    """A run of tokens without a branch inside."""

    tokens: np.ndarray  # i32[n]; n = 0 only for the root
    call: int  # index of the call that sampled it, CONTEXT for prompt and environment text
    parent: int  # segment index; -1 for the root
    depth: int  # path position of the first token
    children: list[int] = field(default_factory=list)

    @property
    def end_depth(self) -> int:
        return self.depth + int(self.tokens.shape[0])


class PrefixTree:
    """Grows by `add`. Calls are numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.segments = [Segment(np.zeros(0, np.int32), CONTEXT, -1, 0)]
        self.calls: list[CallRecord] = []
        self.rollout: list[int] = []  # rollout of each call
        self.prompt_end: list[int] = []  # segment in which each call's prompt ends
        self.sampled: list[int] = []  # each call's own segment; -1 if it sampled nothing
        self.extends: list[tuple[int, ...]] = []  # calls whose sampled tokens a prompt runs through
        self.total_tok = 0
        self._by_id: dict[str, int] = {}

    def add(self, call: CallRecord, rollout: int = 0) -> int:
        """Adds one call and returns its number. Time: O(prompt) comparisons, O(new) memory."""
        if call.call_id in self._by_id:
            raise RecordError(f"call {call.call_id} was added twice; call ids are unique in a run")
        index = len(self.calls)
        at, through = self._walk(call, rollout)
        own = -1
        if call.completion_tok:
            own = self._append(at, np.asarray(call.completion.ids, np.int32), index)
        self.calls.append(call)
        self.rollout.append(rollout)
        self.prompt_end.append(at)
        self.sampled.append(own)
        self.extends.append(tuple(through))
        self._by_id[call.call_id] = index
        return index

    def path(self, segment: int) -> list[int]:
        """Segment numbers from below the root down to `segment`."""
        out: list[int] = []
        while segment > ROOT:
            out.append(segment)
            segment = self.segments[segment].parent
        return out[::-1]

    def tokens_of(self, index: int) -> np.ndarray:
        """i32[P + C]: the call's prompt and completion, read back from the tree."""
        last = self.sampled[index] if self.sampled[index] >= 0 else self.prompt_end[index]
        parts = [self.segments[s].tokens for s in self.path(last)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def shared_context_tok(self, prompt: np.ndarray) -> int:
        """How many tokens of `prompt`, from the root on, are context of this tree already."""
        at, i = ROOT, 0
        while i < len(prompt):
            child = self._context_child(at, int(prompt[i]))
            if child is None:
                return i
            common = common_prefix(self.segments[child].tokens, prompt[i:])
            i += common
            if common < len(self.segments[child].tokens):
                return i
            at = child
        return i

    def _walk(self, call: CallRecord, rollout: int) -> tuple[int, list[int]]:
        """Follows the prompt as far as the tree has it, grows the rest; -> (segment, calls met)."""
        prompt = np.asarray(call.prompt_ids, np.int32)
        spans = {span.start: span for span in call.spans if span.offset == 0}
        at, i = ROOT, 0
        through: list[int] = []
        while i < len(prompt):
            source = self._sampled_child(at, prompt, i, spans.get(i), rollout)
            if source is not None:
                at = self.sampled[source]
                through.append(source)
                i += self.segments[at].tokens.shape[0]
                continue
            child = self._context_child(at, int(prompt[i]))
            if child is None:
                return self._append(at, prompt[i:], CONTEXT), through
            common = common_prefix(self.segments[child].tokens, prompt[i:])
            at = self._split(child, common)
            i += common
        return at, through

    def _sampled_child(
        self, at: int, prompt: np.ndarray, i: int, span: Span | None, rollout: int
    ) -> int | None:
        """The call below `at` whose whole completion comes next: as spliced, else the latest."""
        matches = [
            segment.call
            for segment in (self.segments[c] for c in self.segments[at].children)
            if segment.call != CONTEXT
            and self.rollout[segment.call] == rollout
            and np.array_equal(segment.tokens, prompt[i : i + len(segment.tokens)])
        ]
        if span is not None:
            declared = self._by_id.get(span.call_id)
            return declared if declared in matches else None
        return max(matches, default=None)

    def _context_child(self, at: int, token: int) -> int | None:
        for child in self.segments[at].children:
            segment = self.segments[child]
            if segment.call == CONTEXT and int(segment.tokens[0]) == token:
                return child
        return None

    def _append(self, parent: int, tokens: np.ndarray, call: int) -> int:
        index = len(self.segments)
        self.segments.append(Segment(tokens, call, parent, self.segments[parent].end_depth))
        self.segments[parent].children.append(index)
        self.total_tok += int(tokens.shape[0])
        return index

    def _split(self, index: int, at: int) -> int:
        """Cuts a context segment after `at` tokens; returns the upper part (maybe all of it)."""
        lower = self.segments[index]
        if at == len(lower.tokens):
            return index
        upper = len(self.segments)
        self.segments.append(
            Segment(lower.tokens[:at], CONTEXT, lower.parent, lower.depth, children=[index])
        )
        siblings = self.segments[lower.parent].children
        siblings[siblings.index(index)] = upper
        lower.tokens, lower.parent, lower.depth = lower.tokens[at:], upper, lower.depth + at
        return upper


def build_tree(calls: Sequence[CallRecord]) -> PrefixTree:
    """The prefix tree of one rollout's calls, in the order in which they were sampled."""
    tree = PrefixTree()
    for call in calls:
        tree.add(call)
    return tree

"""Composes a prompt from sampled ids and rendered text.

A conversation is cut at the assistant turns that this episode sampled. Each of them is put in as
its recorded ids; what lies between is rendered once. A prompt is thus a pure function of the
turns and of which calls they match, so an appended conversation starts with the earlier prompt
and completion, token for token. Matching: tool-call ids first, then content (arguments in any
spelling, reasoning kept or dropped).
Not here: HTTP, sampling, who asks. Source: contracts.md, 'What a prompt is'.
Invariant: only assistant turns are spliced, each call at most once in a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clawgym_jax.core.types import Span
from clawgym_jax.proxy.chat_template import ChatCodec, Tools
from clawgym_jax.proxy.tool_calls import canonical_arguments
from clawgym_jax.proxy.turns import Turn

HistoryMode = Literal["restore", "branch"]


@dataclass(slots=True)
class KnownTurn:
    """An assistant turn that was sampled in this episode."""

    call_id: str
    ordinal: int
    turn: Turn  # as the harness saw it
    ids: np.ndarray  # i32[C]
    history: int  # fingerprint of the turns it answered
    continues: tuple[str, ...]
    delivered: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the engine, and where they come from."""

    ids: np.ndarray  # i32[P]
    spans: tuple[Span, ...]
    encoded: tuple[tuple[int, int], ...]  # (start, length) of environment text
    history: int  # fingerprint of the turns
    causes: tuple[str, ...]  # what could not be matched

    @property
    def continues(self) -> tuple[str, ...]:
        return tuple(span.call_id for span in self.spans)


class SampledTurns:
    """All turns sampled in an episode, to be found by what a harness shows of them."""

    def __init__(self) -> None:
        self._by_tool_call: dict[str, KnownTurn] = {}
        self._by_content: dict[Hashable, list[KnownTurn]] = {}
        self._by_call: dict[str, KnownTurn] = {}
        self._answered: set[int] = set()

    def add(self, known: KnownTurn) -> None:
        self._by_call[known.call_id] = known
        self._by_content.setdefault(_content_key(known.turn), []).append(known)
        self._answered.add(known.history)
        for call in known.turn.calls:
            self._by_tool_call[_bare_id(call.id)] = known

    def mark_delivered(self, call_id: str) -> None:
        if call_id in self._by_call:
            self._by_call[call_id].delivered = True

    def match(
        self, turn: Turn, history: int, used: tuple[str, ...], mode: HistoryMode
    ) -> tuple[KnownTurn | None, str]:
        """The sampled turn that `turn` re-presents, or None with the cause."""
        named = [self._by_tool_call.get(_bare_id(call.id)) for call in turn.calls]
        if any(named):
            known = named[0]
            whole = known is not None and len(turn.calls) == len(known.turn.calls)
            if known is None or not whole or any(other is not known for other in named):
                return None, "edited turn"
        else:
            known = self._find_by_content(turn, history, used)
        if known is None:
            return None, "edited turn" if history in self._answered else "foreign turn"
        if known.call_id in used:
            return None, "repeated turn"
        if mode == "branch" and known.turn.thinking and not turn.thinking:
            return None, "dropped thinking"
        return known, ""

    def _find_by_content(self, turn: Turn, history: int, used: tuple[str, ...]) -> KnownTurn | None:
        candidates = self._by_content.get(_content_key(turn), ())
        thinking = turn.thinking.strip()
        fitting = [
            known
            for known in candidates
            if known.call_id not in used and thinking in ("", known.turn.thinking.strip())
        ]
        return max(
            fitting,
            key=lambda known: (
                known.history == history,
                known.continues == used,
                known.delivered,
                known.ordinal,
            ),
            default=None,
        )


def compose(
    codec: ChatCodec,
    sampled: SampledTurns,
    turns: Sequence[Turn],
    tools: Tools,
    mode: HistoryMode = "restore",
) -> Prompt:
    """The prompt that re-presents what was sampled and renders the rest."""
    builder = _Builder(codec, tools)
    history = hash(json.dumps(tools))
    causes: list[str] = []
    pending: list[Turn] = []
    for turn in in_call_order(turns):
        known = None
        if turn.role == "assistant":
            known, cause = sampled.match(turn, history, builder.used, mode)
            if known is None:
                causes.append(cause)
        if known is None:
            pending.append(turn)
            history = hash((history, _content_key(turn), turn.thinking))
        else:
            builder.render(pending)
            builder.splice(known)
            pending = []
            history = hash((history, known.call_id))
    builder.render(pending)
    if builder.dropped_thinking:
        causes.append("thinking left out by the template")
    return builder.prompt(history, tuple(dict.fromkeys(causes)))


class _Builder:
    """Collects the pieces of one prompt."""

    def __init__(self, codec: ChatCodec, tools: Tools) -> None:
        self._codec = codec
        self._tools = tools
        self._pieces: list[np.ndarray] = []
        self._length = 0
        self._spans: list[Span] = []
        self._encoded: list[tuple[int, int]] = []
        self.used: tuple[str, ...] = ()
        self.dropped_thinking = False

    def render(self, turns: Sequence[Turn]) -> None:
        if self._spans:
            rendering = self._codec.segment(turns)
        else:
            rendering = self._codec.head(turns, self._tools)
        self.dropped_thinking |= rendering.dropped_thinking
        self._add_encoded(rendering.ids)

    def splice(self, known: KnownTurn) -> None:
        self._spans.append(Span(self._length, int(known.ids.size), known.call_id))
        self.used = (*self.used, known.call_id)
        self._add(known.ids)
        if not known.ids.size or known.ids[-1] != self._codec.end_of_turn_id:
            self._add_encoded(np.asarray([self._codec.end_of_turn_id], np.int32))

    def prompt(self, history: int, causes: tuple[str, ...]) -> Prompt:
        ids = np.concatenate(self._pieces).astype(np.int32, copy=False)
        return Prompt(ids, tuple(self._spans), tuple(self._encoded), history, causes)

    def _add_encoded(self, ids: np.ndarray) -> None:
        self._encoded.append((self._length, int(ids.size)))
        self._add(ids)

    def _add(self, ids: np.ndarray) -> None:
        self._pieces.append(ids)
        self._length += int(ids.size)


def in_call_order(turns: Sequence[Turn]) -> list[Turn]:
    """Results of parallel calls in the order of the calls: templates name no ids."""
    ordered: list[Turn] = []
    order: dict[str, int] = {}
    run: list[Turn] = []
    for turn in turns:
        if turn.role == "tool":
            run.append(turn)
            continue
        ordered += _sorted_results(run, order)
        run = []
        if turn.role == "assistant":
            order = {_bare_id(call.id): index for index, call in enumerate(turn.calls)}
        ordered.append(turn)
    return ordered + _sorted_results(run, order)


def _sorted_results(run: list[Turn], order: dict[str, int]) -> list[Turn]:
    if len(run) < 2:
        return run
    return sorted(run, key=lambda turn: order.get(_bare_id(turn.tool_call_id), len(order)))


def _content_key(turn: Turn) -> Hashable:
    """Equal for turns that say the same. Reasoning is compared apart."""
    calls = tuple((call.name, canonical_arguments(call.arguments)) for call in turn.calls)
    return turn.role, turn.text.strip(), calls


def _bare_id(tool_call_id: str) -> str:
    """Harnesses drop what is not alphanumeric from ids."""
    return "".join(filter(str.isalnum, tool_call_id))

"""Finds the sampled turns behind what a harness shows of them.

By tool-call ids first, then by content: arguments in any spelling, white space changed, reasoning
kept or dropped. One shown message may be several sampled turns (a harness merges what a cut
connection parted), and several shown messages may be one sampled turn (text and calls apart).
Not here: token ids (splice.py). Source: contracts.md, 'What a prompt is'.
Invariant: a match accounts for all text and all calls of what is shown, and uses a call once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from clawgym_jax.proxy.tool_calls import canonical_arguments
from clawgym_jax.proxy.turns import ToolCall, Turn

HistoryMode = Literal["restore", "branch"]
_INDEXED = 8  # non-blank characters by which texts are looked up
_MOST_STEPS = 200  # of the search for merged turns


@dataclass(slots=True, eq=False)
class KnownTurn:
    """An assistant turn that was sampled in this episode."""

    call_id: str
    ordinal: int
    turn: Turn  # as the harness saw it
    ids: np.ndarray  # i32[C]
    history: int  # fingerprint of the turns it answered
    continues: tuple[str, ...]
    chain: str = "main"
    delivered: bool = False
    squashed: str = field(init=False)  # the text without white space

    def __post_init__(self) -> None:
        self.squashed = _squash(self.turn.text)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a conversation a message stands."""

    history: int  # fingerprint of what comes before it
    used: tuple[str, ...] = ()  # calls spliced before it
    chain: str = "main"


@dataclass(frozen=True, slots=True)
class Match:
    """Sampled turns behind one shown message, or the cause why there are none."""

    parts: tuple[KnownTurn, ...] = ()
    gaps: tuple[str, ...] = ()  # white space that the harness put behind each part but the last
    cause: str = ""


class SampledTurns:
    """All turns sampled in an episode, to be found by what a harness shows of them."""

    def __init__(self) -> None:
        self._by_tool_call: dict[str, KnownTurn] = {}
        self._by_content: dict[Hashable, list[KnownTurn]] = {}
        self._by_start: dict[str, list[KnownTurn]] = {}
        self._by_call: dict[str, KnownTurn] = {}
        self._answered: set[int] = set()

    def add(self, known: KnownTurn) -> None:
        self._by_call[known.call_id] = known
        self._by_content.setdefault(content_key(known.turn), []).append(known)
        start = known.squashed[:_INDEXED]
        if start:
            self._by_start.setdefault(start, []).append(known)
        self._answered.add(known.history)
        for call in known.turn.calls:
            self._by_tool_call[bare_id(call.id)] = known

    def mark_delivered(self, call_id: str) -> None:
        if call_id in self._by_call:
            self._by_call[call_id].delivered = True

    def match(self, turn: Turn, at: Place, mode: HistoryMode = "restore") -> Match:
        """What `turn`, an assistant message, re-presents."""
        match = self._match_calls(turn)
        if match is None:
            known = self._find_by_content(turn, at)
            match = Match((known,)) if known else self._match_merged(turn, at)
        if not match.parts:
            return match
        if any(known.call_id in at.used for known in match.parts):
            return Match(cause="repeated turn")
        thought = any(known.turn.thinking for known in match.parts)
        if mode == "branch" and thought and not turn.thinking:
            return Match(cause="dropped thinking")
        return match

    def match_split(self, turns: Sequence[Turn], at: Place) -> Match:
        """One sampled turn shown as several messages in a row, or no match."""
        whole = joined(turns)
        ids = {bare_id(call.id) for call in whole.calls}
        candidates = {self._by_tool_call[i].call_id for i in ids if i in self._by_tool_call}
        found = [
            known
            for known in map(self._by_call.__getitem__, candidates)
            if {bare_id(call.id) for call in known.turn.calls} == ids
            and known.squashed == _squash(whole.text)
        ]
        known = found[0] if found else self._find_by_content(whole, at)
        return Match((known,)) if known and known.call_id not in at.used else Match()

    def _match_calls(self, turn: Turn) -> Match | None:
        """By tool-call ids; None where they name nothing that was sampled here."""
        named = [self._by_tool_call.get(bare_id(call.id)) for call in turn.calls]
        known = named[0] if named else None
        if not any(named):
            return None
        if known and all(other is known for other in named):
            if sorted(_ids(turn.calls)) == sorted(_ids(known.turn.calls)):
                if _says_nothing_new(turn, known):
                    return Match((known,))
                merged = self._match_merged(turn, Place(0))
                return merged if len(merged.parts) > 1 else Match(cause="edited turn")
        elif None not in named:
            merged = self._match_merged(turn, Place(0))
            if merged.parts:
                return merged
        return Match(cause="edited turn")

    def _find_by_content(self, turn: Turn, at: Place) -> KnownTurn | None:
        candidates = self._by_content.get(content_key(turn), ())
        fitting = [
            known
            for known in candidates
            if known.call_id not in at.used and _thinks_alike(turn, (known,))
        ]
        return max(fitting, key=lambda known: _preference(known, at), default=None)

    def _match_merged(self, turn: Turn, at: Place) -> Match:
        """Turns in the order of sampling whose texts and calls, one after another, are `turn`'s."""
        text = _squash(turn.text)
        seen: set[tuple[int, int]] = set()
        open_ends: list[tuple[int, int, tuple[KnownTurn, ...]]] = [(0, 0, ())]
        while open_ends and len(seen) < _MOST_STEPS:
            text_at, calls_at, parts = open_ends.pop()
            if text_at == len(text) and calls_at == len(turn.calls):
                if parts and _thinks_alike(turn, parts):
                    return Match(parts, _gaps(turn.text, parts))
                continue
            if (text_at, calls_at) in seen:
                continue
            seen.add((text_at, calls_at))
            after = parts[-1].ordinal if parts else -1
            best: dict[tuple[str, int], KnownTurn] = {}  # one of those that say the same
            for known in self._starting(text, text_at, turn.calls[calls_at:]):
                if known.ordinal > after and known.call_id not in at.used:
                    says = known.squashed, len(known.turn.calls)
                    rival = best.get(says)
                    if rival is None or _preference(known, at) > _preference(rival, at):
                        best[says] = known
            for known in sorted(best.values(), key=lambda known: _preference(known, at)):
                length, calls = len(known.squashed), len(known.turn.calls)
                open_ends.append((text_at + length, calls_at + calls, (*parts, known)))
        return Match(cause="edited turn" if at.history in self._answered else "foreign turn")

    def _starting(self, text: str, at: int, calls: Sequence[ToolCall]) -> Iterator[KnownTurn]:
        """Known turns that can be the next part: their text and calls come next."""
        seen: set[str] = set()
        named = self._by_tool_call.get(bare_id(calls[0].id)) if calls else None
        candidates = [named] if named else []
        for length in range(1, _INDEXED + 1):
            candidates += self._by_start.get(text[at : at + length], ())
        for known in candidates:
            mine = known.turn.calls
            if known.call_id not in seen and text.startswith(known.squashed, at):
                seen.add(known.call_id)
                if _call_keys(mine) == _call_keys(calls[: len(mine)]) or _ids(mine) == _ids(
                    calls[: len(mine)]
                ):
                    yield known


def joined(turns: Sequence[Turn]) -> Turn:
    """Several assistant messages in a row as one."""
    return Turn(
        "assistant",
        "\n".join(turn.text for turn in turns if turn.text),
        tuple(call for turn in turns for call in turn.calls),
        "",
        "\n".join(turn.thinking for turn in turns if turn.thinking),
    )


def content_key(turn: Turn) -> Hashable:
    """Equal for turns that say the same. Reasoning is compared apart."""
    return turn.role, turn.text.strip(), _call_keys(turn.calls)


def bare_id(tool_call_id: str) -> str:
    """Harnesses drop what is not alphanumeric from ids."""
    return tool_call_id if tool_call_id.isalnum() else "".join(filter(str.isalnum, tool_call_id))


def _preference(known: KnownTurn, at: Place) -> tuple[bool | int, ...]:
    """Same question first, then same ancestors, the same agent, delivered, the latest."""
    return (
        known.history == at.history,
        known.continues == at.used,
        known.chain == at.chain,
        known.delivered,
        known.ordinal,
    )


def _thinks_alike(turn: Turn, parts: Sequence[KnownTurn]) -> bool:
    """The reasoning shown is what was sampled, or there is none."""
    shown = _squash(turn.thinking)
    return not shown or shown == "".join(_squash(known.turn.thinking) for known in parts)


def _says_nothing_new(turn: Turn, known: KnownTurn) -> bool:
    """What `turn` shows beside its calls is what was sampled, or a part of it, or nothing."""
    thinking = _squash(known.turn.thinking)
    return _squash(turn.text) in known.squashed and _squash(turn.thinking) in thinking


def _gaps(text: str, parts: Sequence[KnownTurn]) -> tuple[str, ...]:
    """White space in `text` behind each part but the last."""
    gaps, at = [], 0
    for known in parts[:-1]:
        left = len(known.squashed)
        while left:
            left -= not text[at].isspace()
            at += 1
        end = at
        while end < len(text) and text[end].isspace():
            end += 1
        gaps.append(text[at:end])
        at = end
    return tuple(gaps)


def _call_keys(calls: Sequence[ToolCall]) -> Hashable:
    return tuple((call.name, canonical_arguments(call.arguments)) for call in calls)


def _ids(calls: Sequence[ToolCall]) -> list[str]:
    return [bare_id(call.id) for call in calls]


def _squash(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())

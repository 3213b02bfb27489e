"""Composes a prompt from sampled ids and rendered text.

A conversation is cut at the assistant turns that this episode sampled. Each of them is put in as
its recorded ids; what lies between is rendered once. A prompt is thus a pure function of the
turns and of which calls they match, so an appended conversation starts with the earlier prompt
and completion, token for token.
Not here: which turns match (matching.py), HTTP, sampling. Source: contracts.md, 'What a prompt is'.
Invariant: only assistant turns are spliced, each call at most once in a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.types import Span
from clawgym_jax.proxy.chat_template import ChatCodec, Tools
from clawgym_jax.proxy.matching import (
    HistoryMode,
    KnownTurn,
    Match,
    Place,
    SampledTurns,
    bare_id,
    content_key,
)
from clawgym_jax.proxy.rendering import Renderings, Stretch, packed
from clawgym_jax.proxy.turns import Turn

__all__ = ["HistoryMode", "KnownTurn", "Plan", "Prompt", "SampledTurns", "compose"]


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversation as stretches to render and sampled turns to put between them."""

    stretches: tuple[Stretch, ...]  # one more than matches
    matches: tuple[Match, ...]
    history: int
    causes: tuple[str, ...]


def compose(
    codec: ChatCodec,
    sampled: SampledTurns,
    turns: Sequence[Turn],
    tools: Tools,
    mode: HistoryMode = "restore",
) -> Prompt:
    """The prompt that re-presents what was sampled and renders the rest."""
    return assemble(codec, Renderings(codec.cache), plan_prompt(sampled, turns, tools, mode))


def plan_prompt(
    sampled: SampledTurns,
    turns: Sequence[Turn],
    tools: Tools,
    mode: HistoryMode = "restore",
    chain: str = "main",
) -> Plan:
    """Which turns are sampled ones; chain: of the call that asks."""
    tools_key = packed(list(tools)) if tools else b""
    planner = _Planner(sampled, Place(hash(tools_key), (), chain), mode)
    ordered = in_call_order(turns)
    at = 0
    while at < len(ordered):
        end = at + 1
        while ordered[at].role == "assistant" and end < len(ordered):
            if ordered[end].role != "assistant":
                break
            end += 1
        planner.take(ordered[at:end])
        at = end
    stretches = tuple(
        Stretch(tuple(part), tools if not i else (), tools_key if not i else b"", not i)
        for i, part in enumerate(planner.stretches)
    )
    return Plan(stretches, tuple(planner.matches), planner.at.history, tuple(planner.causes))


class _Planner:
    """Walks through a conversation."""

    def __init__(self, sampled: SampledTurns, at: Place, mode: HistoryMode) -> None:
        self._sampled = sampled
        self._mode = mode
        self.at = at
        self.stretches: list[list[Turn]] = [[]]
        self.matches: list[Match] = []
        self.causes: dict[str, None] = {}  # in order of appearance

    def take(self, run: Sequence[Turn]) -> None:
        """One turn of the environment, or assistant turns in a row."""
        if run[0].role != "assistant":
            self._render(run[0])
            return
        if len(run) > 1 and self._mode == "restore":
            split = self._sampled.match_split(run, self.at)
            if split.parts:
                self._splice(split)
                return
        for turn in run:
            match = self._sampled.match(turn, self.at, self._mode)
            if match.parts:
                self._splice(match)
            else:
                self.causes[match.cause] = None
                self._render(turn)

    def _render(self, turn: Turn) -> None:
        self.stretches[-1].append(turn)
        history = hash((self.at.history, content_key(turn), turn.thinking))
        self.at = Place(history, self.at.used, self.at.chain)

    def _splice(self, match: Match) -> None:
        self.matches.append(match)
        self.stretches.append([])
        if len(match.parts) > 1:
            self.causes["merged turns"] = None
        for known in match.parts:
            history = hash((self.at.history, known.call_id))
            self.at = Place(history, (*self.at.used, known.call_id), self.at.chain)


def assemble(codec: ChatCodec, renderings: Renderings, plan: Plan) -> Prompt:
    """The ids of a plan."""
    pieces = _Pieces(codec)
    causes = dict.fromkeys(plan.causes)
    for i, stretch in enumerate(plan.stretches):
        rendering = renderings.get(stretch, codec.render)
        if rendering.dropped_thinking:
            causes["thinking left out by the template"] = None
        pieces.add_encoded(rendering.ids)
        if i < len(plan.matches):
            pieces.splice(plan.matches[i])
    return pieces.prompt(plan.history, tuple(causes))


class _Pieces:
    """Collects the pieces of one prompt."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._pieces: list[np.ndarray] = []
        self._length = 0
        self._spans: list[Span] = []
        self._encoded: list[tuple[int, int]] = []

    def splice(self, match: Match) -> None:
        """Sampled ids; the end-of-turn token only where the turn ends."""
        end = self._codec.end_of_turn_id
        for known, gap in zip(match.parts, match.gaps, strict=False):
            closed = bool(known.ids.size) and int(known.ids[-1]) == end
            self._add_span(known, known.ids[:-1] if closed else known.ids)
            if gap:
                self.add_encoded(self._codec.encode_text(gap))
        last = match.parts[-1]
        self._add_span(last, last.ids)
        if not last.ids.size or int(last.ids[-1]) != end:
            self.add_encoded(np.asarray([end], np.int32))

    def add_encoded(self, ids: np.ndarray) -> None:
        self._encoded.append((self._length, int(ids.size)))
        self._add(ids)

    def prompt(self, history: int, causes: tuple[str, ...]) -> Prompt:
        ids = np.concatenate(self._pieces).astype(np.int32, copy=False)
        return Prompt(ids, tuple(self._spans), tuple(self._encoded), history, causes)

    def _add_span(self, known: KnownTurn, ids: np.ndarray) -> None:
        self._spans.append(Span(self._length, int(ids.size), known.call_id))
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
        if turn.role == "assistant":  # messages in a row are one turn
            order = order if ordered and ordered[-1].role == "assistant" else {}
            for call in turn.calls:
                order.setdefault(bare_id(call.id), len(order))
        ordered.append(turn)
    return ordered + _sorted_results(run, order)


def _sorted_results(run: list[Turn], order: dict[str, int]) -> list[Turn]:
    if len(run) < 2:
        return run
    return sorted(run, key=lambda turn: order.get(bare_id(turn.tool_call_id), len(order)))

"""How the prompts of a group of rollouts coincide, without their text.

A file in tests/data/recorded_trees holds one group. Each call says how long its prompt and its
completion were, which earlier call of the group its prompt has most in common with and how many
tokens, and which stretches beyond are turns of its rollout put in verbatim. That is all that a
prefix tree depends on: `expand` makes calls of it whose trees are those of the recorded ones, token
for token, with anonymous numbers for ids (`record` checks it when it writes the file).
Not here: recording (`record`, `play`). Invariant: two tokens have one number only where one is a
copy of the other, so nothing coincides by chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from clawgym_jax.core.types import (
    CallRecord,
    Completion,
    Delivery,
    Episode,
    EpisodeRecord,
    Finish,
    Grade,
    Outcome,
    Role,
    SamplingParams,
    Span,
)

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "data" / "recorded_trees"
LOGPROB = -6.9  # of every token, as if sampled evenly from about a thousand


@dataclass(frozen=True, slots=True)
class CallForm:
    """One call of a rollout. Calls are counted from 0 within their rollout."""

    role: str
    prompt: int
    completion: int
    like: tuple[int, int, int] | None  # (rollout, call, tokens in common); None: starts afresh
    spans: tuple[tuple[int, int, int], ...] = ()  # start, length, call whose completion it is
    continues: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """Rollouts of one task through one program."""

    program: str  # with its version
    protocol: str
    recorded: str  # when and how
    other_task_tok: int  # how much of the first prompt another task's first prompt has as well
    rollouts: tuple[tuple[CallForm, ...], ...]


def write(path: Path, group: Group) -> None:
    """One call a line."""
    head = {key: value for key, value in asdict(group).items() if key != "rollouts"}
    rollouts = ",\n".join(
        "[\n" + ",\n".join(json.dumps(asdict(call)) for call in rollout) + "\n]"
        for rollout in group.rollouts
    )
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    path.write_text(f'{{\n{lines},\n"rollouts": [\n{rollouts}\n]\n}}\n', encoding="utf-8")


def stored(name: str) -> Group:
    """The group of a file in `FOLDER`, named without its ending."""
    return read(FOLDER / f"{name}.json")


def read(path: Path) -> Group:
    found = json.loads(path.read_text(encoding="utf-8"))
    rollouts = tuple(
        tuple(
            CallForm(
                **call
                | {
                    "like": tuple(call["like"]) if call["like"] else None,
                    "spans": tuple(map(tuple, call["spans"])),
                    "continues": tuple(call["continues"]),
                }
            )
            for call in rollout
        )
        for rollout in found["rollouts"]
    )
    return Group(**found | {"rollouts": rollouts})


class _Numbers:
    """Numbers that nobody has yet. Of every run of them, each `thin`-th is to be kept."""

    def __init__(self, thin: int) -> None:
        self._thin = thin
        self._kept: list[np.ndarray] = []
        self.count = 0

    def fresh(self, size: int) -> np.ndarray:
        self._kept.append(np.arange(size) % self._thin == 0)
        self.count += size
        return np.arange(self.count - size, self.count, dtype=np.int32)

    @property
    def kept(self) -> np.ndarray:
        """bool[count]"""
        return np.concatenate(self._kept)


def expand(group: Group, number: int = 0, thin: int = 1) -> list[list[CallRecord]]:
    """The calls of every rollout. Ids are below `number` + 1 times the group's distinct tokens.

    number: of a copy of the group with another task; all copies have the program's own prompt in
    common, as two recorded tasks had. thin: keep each thin-th token of what a call brought; a token
    is kept in all calls or in none, so a smaller tree of the same shape remains.
    """
    numbers = _Numbers(thin)
    made: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for rollout in group.rollouts:
        made.append([])
        for form in rollout:
            made[-1].append((_prompt(form, made, numbers), numbers.fresh(form.completion)))
    kept = numbers.kept
    shift = np.where(np.arange(numbers.count) < group.other_task_tok, 0, number * numbers.count)
    return [
        [
            _call(f"g{number}r{r}", c, form, *made[r][c], kept, shift, group.protocol)
            for c, form in enumerate(rollout)
        ]
        for r, rollout in enumerate(group.rollouts)
    ]


def _prompt(
    form: CallForm, made: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], numbers: _Numbers
) -> np.ndarray:
    """i32[P]: what is like an earlier call's tokens, then turns put in and new numbers."""
    prompt, common = np.zeros(form.prompt, np.int32), 0
    if form.like:
        rollout, call, common = form.like
        prompt[:common] = np.concatenate(made[rollout][call])[:common]
    at = common
    for start, length, source in form.spans:
        if start + length <= common:
            continue
        first = max(start, common)
        prompt[at:first] = numbers.fresh(first - at)
        at = start + length
        prompt[first:at] = made[-1][source][1][first - start : length]
    prompt[at:] = numbers.fresh(form.prompt - at)
    return prompt


def _call(
    episode: str,
    ordinal: int,
    form: CallForm,
    prompt: np.ndarray,
    completion: np.ndarray,
    kept: np.ndarray,
    shift: np.ndarray,
    protocol: str,
) -> CallRecord:
    before = np.concatenate([[0], np.cumsum(kept[prompt])])  # kept tokens before each of the prompt
    spans = tuple(
        Span(
            int(before[start]),
            int(before[start + length] - before[start]),
            f"{episode}.{source}",
        )
        for start, length, source in form.spans
    )

    def shifted(ids: np.ndarray) -> np.ndarray:
        return np.asarray((ids + shift[ids])[kept[ids]], np.int32)

    return make_call(
        episode,
        ordinal,
        shifted(prompt),
        shifted(completion),
        spans,
        role=Role(form.role),
        continues=tuple(f"{episode}.{i}" for i in form.continues),
        protocol=protocol,
    )


def make_call(
    episode: str,
    ordinal: int,
    prompt: np.ndarray,  # i32[P]
    ids: np.ndarray,  # i32[C]
    spans: tuple[Span, ...] = (),
    role: Role = Role.MAIN,
    continues: tuple[str, ...] = (),
    protocol: str = "anthropic",
) -> CallRecord:
    """A delivered call on policy, at temperature 1."""
    same = np.full(len(ids), LOGPROB, np.float32)
    versions = np.ones(len(ids), np.uint32)
    return CallRecord(
        run_id="bench",
        episode_id=episode,
        call_id=f"{episode}.{ordinal}",
        ordinal=ordinal,
        attempt=0,
        chain="main",
        role=role,
        protocol=protocol,
        prompt_ids=prompt,
        completion=Completion(ids, same, same, versions, Finish.STOP),
        spans=spans,
        continues=continues,
        breaks=(),
        shared_tok=0,
        spliced_tok=0,
        encoded_tok=len(prompt),
        requested={},
        effective=SamplingParams(),
        model="policy",
        delivery=Delivery.DELIVERED,
    )


def episodes(rollouts: Sequence[Sequence[CallRecord]], group: str = "g") -> list[Episode]:
    """Graded episodes of one group: every other one succeeded."""
    return [
        Episode(
            EpisodeRecord(
                run_id="bench",
                episode_id=calls[0].episode_id,
                group_id=group,
                task_id=group,
                harness="recorded",
                split="train",
                step=0,
                seed=i,
                outcome=Outcome.OK,
                detail="",
                grade=Grade(float(i % 2)),
                call_ids=tuple(call.call_id for call in calls),
                timings_s={},
            ),
            tuple(calls),
        )
        for i, calls in enumerate(rollouts)
    ]

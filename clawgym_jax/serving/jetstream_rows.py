"""What one decode step says about one request, in the integers that JetStream carries.

A row is: token, log-prob bits, raw log-prob bits, weight version, reason, sentinel. The stock
orchestrator hands out the integers of a row up to the first that is marked invalid, and ends the
request there. The last row's sentinel is: so the token that ends a completion keeps its log-probs.
What a row has no place for (the stop string, cached tokens, routing, a scored completion) is an
`Outcome`, which travels beside it.
Invariant: `Reader` gives back, bit for bit, what `write` was given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, SamplerError
from clawgym_jax.core.types import Completion, Finish

COLUMNS = 6
TOKEN, LOGPROB, RAW, VERSION, REASON, SENTINEL = range(COLUMNS)


class Reason(enum.IntEnum):
    """What a row is."""

    TOKEN = 0  # one token, more follow
    WAITING = 1  # none yet: the request waits for a slot, or its prompt is being prefilled
    LAST = 2  # one token, and the completion ends with it
    OVER = 3  # no token: the completion has ended (an abort, a scored completion, a failure)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, without its tokens, unless they were scored."""

    finish: Finish = Finish.ABORT
    stop_string: str | None = None
    cached_tok: int = 0
    routing: np.ndarray | None = None
    scored: Completion | None = None
    error: SamplerError | None = None


def empty(slots: int) -> np.ndarray:
    """i32[slots, 2 * COLUMNS + 1]: rows that say WAITING; every value valid, length 0."""
    rows = np.zeros((slots, 2 * COLUMNS + 1), np.int32)
    rows[:, REASON] = Reason.WAITING
    rows[:, COLUMNS : 2 * COLUMNS] = 1
    return rows


def write(row: np.ndarray, token: int, logprob: float, raw: float, version: int) -> None:
    """One sampled token."""
    row[TOKEN] = token
    row[LOGPROB : RAW + 1] = np.array([logprob, raw], np.float32).view(np.int32)
    row[VERSION] = np.array(version, np.uint32).view(np.int32)
    row[REASON] = Reason.TOKEN


def end(row: np.ndarray) -> None:
    """The request ends with this row."""
    row[REASON] = Reason.LAST if row[REASON] == Reason.TOKEN else Reason.OVER
    row[COLUMNS + SENTINEL] = 0


class Reader:
    """Collects the rows of one request."""

    def __init__(self) -> None:
        self._rows: list[Sequence[int]] = []
        self.over = False

    def add(self, row: Sequence[int]) -> None:
        """The integers that came with one step, without those from the first invalid one on."""
        if len(row) not in (SENTINEL, COLUMNS):
            raise SamplerError(f"expected a row of {SENTINEL} or {COLUMNS} integers, got {row}")
        reason = row[REASON]
        if reason in (Reason.TOKEN, Reason.LAST):
            self._rows.append(row[:REASON])
        self.over = reason in (Reason.LAST, Reason.OVER)

    def add_all(self, rows: Iterable[Sequence[int]]) -> None:
        for row in rows:
            self.add(row)

    def completion(self, outcome: Outcome) -> Completion:
        """What was sampled, or the error that ended it."""
        if outcome.error is not None:
            raise outcome.error
        if outcome.scored is not None:
            return outcome.scored
        if not self.over and outcome.finish is not Finish.ABORT:
            raise EngineRestarted("JetStream's stream of tokens broke off; send the request again")
        rows = np.array(self._rows, np.int32).reshape(-1, REASON)
        bits = np.ascontiguousarray(rows.T)
        return Completion(
            ids=bits[TOKEN],
            logprobs=bits[LOGPROB].view(np.float32),
            raw_logprobs=bits[RAW].view(np.float32),
            versions=bits[VERSION].view(np.uint32),
            finish=outcome.finish,
            routing=outcome.routing,
            stop_string=outcome.stop_string,
            cached_tok=outcome.cached_tok,
        )

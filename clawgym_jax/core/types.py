"""The records that flow round the circle: tasks, calls, episodes, grades.

Not here: how records are stored (`wire`) or trained on (`tree`, `batch`).
Invariant: every record is frozen; arrays are numpy, one-dimensional unless said.
Source: shared definitions of the ClawGym II paper, section 3 (infrastructure and prefix tree).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Finish(enum.StrEnum):
    """Why a completion ended. An abort is never taken for a natural stop."""

    STOP = "stop"  # an end-of-turn token, or a stop string
    LENGTH = "length"
    ABORT = "abort"


class Delivery(enum.StrEnum):
    """What became of an answer after it was recorded."""

    PENDING = "pending"  # recorded, not yet known; counts as undelivered after a crash
    DELIVERED = "delivered"  # the final event was written while the connection stood
    DISCONNECTED = "disconnected"
    SUPERSEDED = "superseded"  # never sent: a repeat of the same request got the sample instead


class Role(enum.StrEnum):
    """What a harness made a call for."""

    MAIN = "main"
    SUBAGENT = "sub-agent"
    COMPACTION = "compaction"
    TITLE = "title"
    PROBE = "probe"


class Outcome(enum.StrEnum):
    """How an episode ended. Only OK and TIMEOUT (and harness errors) are graded and trained on."""

    OK = "ok"
    TIMEOUT = "timeout"  # wall clock: forced end, still graded and kept
    HARNESS_ERROR = "harness error"  # the program exited non-zero; graded and kept
    INFRASTRUCTURE = "infrastructure failure"  # in neither baseline nor loss


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Effective sampling of one call. Off: top_p 1, top_k 0, min_p 0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tok: int = 256


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a completion besides its length. The stop token is part of the completion."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What a Sampler returns: every sampled token with its log-probs and weight version."""

    ids: np.ndarray  # i32[C], includes the sampled end-of-turn token
    logprobs: np.ndarray  # f32[C], log softmax(logits / temperature)
    raw_logprobs: np.ndarray  # f32[C], the same at temperature 1
    versions: np.ndarray  # u32[C], weight version that sampled each token
    finish: Finish
    routing: np.ndarray | None = None  # u8[P + C, layers, k] expert ids, None where not captured
    stop_string: str | None = None  # the stop string that was hit, if one was
    cached_tok: int = 0  # prompt tokens whose KV came from an earlier request


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a prompt that is another call's sampled ids, verbatim."""

    start: int  # first prompt index
    length: int
    call_id: str  # the call that sampled these ids
    offset: int = 0  # index into that call's completion


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One model call, token for token. Written before its answer is delivered."""

    run_id: str
    episode_id: str
    call_id: str  # unique in the run
    ordinal: int  # order of sampling within the episode, from 0
    attempt: int  # 0, or how many times the same request was sampled before
    chain: str  # conversation this call belongs to (agent id), "main" where there is one
    role: Role
    protocol: str  # "anthropic" | "openai-chat" | "openai-responses"
    prompt_ids: np.ndarray  # i32[P]
    completion: Completion
    spans: tuple[Span, ...]  # spliced turns in prompt order, not overlapping
    continues: tuple[str, ...]  # call ids whose turns this call's history re-presents
    breaks: tuple[str, ...]  # named causes of what could not be matched ("edited history", ...)
    shared_tok: int  # prompt ledger: tokens equal to an earlier prompt's prefix ...
    spliced_tok: int  # ... sampled ids put in verbatim beyond it ...
    encoded_tok: int  # ... and newly encoded text; the three add up to P
    requested: Mapping[str, Any]  # sampling parameters as the harness asked
    effective: SamplingParams
    model: str  # model name as the harness asked
    delivery: Delivery = Delivery.PENDING
    received_at_s: float = 0.0  # wall clock, seconds since the epoch
    queued_s: float = 0.0  # from arrival to the engine's answer
    text: str = ""  # decoded completion that the harness saw, for people

    @property
    def prompt_tok(self) -> int:
        return int(self.prompt_ids.shape[0])

    @property
    def completion_tok(self) -> int:
        return int(self.completion.ids.shape[0])


@dataclass(frozen=True, slots=True)
class Grade:
    """A reward, or the reason why there is none. `score is None` means: exclude the sample."""

    score: float | None  # in [0, 1]
    reason: str = ""  # why there is no score; empty when there is one
    checks: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One rollout of one (task, harness) instance, after it settled and was graded."""

    run_id: str
    episode_id: str
    group_id: str  # rollouts of one (task, harness) in one step share it
    task_id: str
    harness: str
    split: str  # "train" | "heldout" | "demo" | ...
    step: int
    seed: int
    outcome: Outcome
    detail: str  # why the outcome is not ok; empty otherwise
    grade: Grade
    call_ids: tuple[str, ...]
    timings_s: Mapping[str, float]  # sandbox, harness, model, settle, grade, total
    started_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode with its calls, as training consumes it."""

    record: EpisodeRecord
    calls: tuple[CallRecord, ...]

    @property
    def reward(self) -> float | None:
        if self.record.outcome is Outcome.INFRASTRUCTURE:
            return None
        return self.record.grade.score

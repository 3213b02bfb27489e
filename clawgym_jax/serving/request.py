"""One request at the engine, what came of it so far, and the counters of all of them.

Not here: slots, programs. Invariant: a completion carries every sampled token with its log-probs
and weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from clawgym_jax.core.errors import SamplerError
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop


@dataclass(slots=True, eq=False)
class Request:
    """One call of `sample` or `score`."""

    request_id: str
    prompt: np.ndarray  # i32[P]
    params: SamplingParams
    stop: Stop
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    forced: np.ndarray | None = None  # i32[C], for score: the ids to teacher-force
    arrived_s: float = 0.0  # monotonic
    slot: int = -1
    filled_tok: int = 0  # prompt tokens with keys and values
    source: int = -1  # slot that the prefix is still to be copied from; -1: none
    cached_tok: int = 0
    cancelled: bool = False
    mixed: bool = False  # weights were swapped under it: its keys and values serve nobody else
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def need_tok(self) -> int:
        """The most tokens that it can come to."""
        new = self.params.max_tok if self.forced is None else len(self.forced)
        return len(self.prompt) + new

    @property
    def left_tok(self) -> int:
        """Prompt tokens to prefill; the last one is fed by the first decode step."""
        return len(self.prompt) - 1 - self.filled_tok

    @property
    def known(self) -> np.ndarray:
        """i32[n], its tokens that have keys and values."""
        if not self.ids:
            return self.prompt[: self.filled_tok]
        return np.concatenate([self.prompt, np.array(self.ids[:-1], np.int32)])

    @property
    def targets(self) -> np.ndarray:
        """i32[C], the ids that it is scored for; none where it samples."""
        return self.forced if self.forced is not None else np.zeros(0, np.int32)

    def take(self, token: int, logprob: float, raw: float, version: int) -> None:
        """One sampled token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.raw.append(raw)
        self.versions.append(version)

    def completion(
        self,
        finish: Finish,
        stop_string: str | None = None,
        routing: np.ndarray | None = None,
    ) -> Completion:
        """Everything that was sampled."""
        return Completion(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            raw_logprobs=np.array(self.raw, np.float32),
            versions=np.array(self.versions, np.uint32),
            finish=finish,
            routing=routing,
            stop_string=stop_string,
            cached_tok=self.cached_tok,
        )


Finished = tuple[Request, Completion | SamplerError]


class Flight(NamedTuple):
    """A decode step whose results nobody has looked at yet."""

    requests: dict[int, Request]  # by slot
    version: int
    results: Any  # (draw, experts), on the device

    def has(self, request: Request) -> bool:
        return self.requests.get(request.slot) is request

    def among(self, running: dict[int, Request]) -> list[tuple[int, Request]]:
        """Those that it was started for."""
        return [(slot, r) for slot, r in running.items() if self.has(r)]


@dataclass(slots=True)
class DriverStats:
    """Counters since the start; the run's metrics take differences."""

    requests: int = 0  # that got a slot
    sampled_tok: int = 0
    prefilled_tok: int = 0
    cached_tok: int = 0  # prompt tokens whose keys and values were there: in a slot ...
    pooled_tok: int = 0  # ... of which these came from the pool
    evicted_pages: int = 0
    steps: int = 0
    slot_steps: int = 0  # busy slots summed over steps
    queue_s: float = 0.0  # from arrival to a slot, summed over requests
    first_token_s: float = 0.0  # from arrival to the first sampled token, summed
    first_tokens: int = 0
    restarts: int = 0
    busy_s: float = 0.0  # thread time with work at hand
    device_s: float = 0.0  # of it, waiting for the device
    idle_s: float = 0.0

    def admitted(self, waited_s: float, cached_tok: int) -> None:
        """A request got a slot, with so many tokens of its prompt."""
        self.requests += 1
        self.queue_s += waited_s
        self.cached_tok += cached_tok

    def began(self, after_s: float) -> None:
        """A request got its first token."""
        self.first_tokens += 1
        self.first_token_s += after_s

    def stepped(self, busy: int) -> None:
        """A decode step gave `busy` requests a token."""
        self.steps += 1
        self.slot_steps += busy
        self.sampled_tok += busy


class StopRule:
    """What ends a completion besides its length."""

    def __init__(self, window_tok: int, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._window_tok = window_tok
        self._decode = decode

    def verdict(self, r: Request) -> tuple[Finish | None, str | None]:
        """After a token was added. Raises SamplerError where the tokenizer fails."""
        if r.ids[-1] in r.stop.token_ids:
            return Finish.STOP, None
        found = self._stop_string(r) if r.stop.strings else None
        if found is not None:
            return Finish.STOP, found
        return (Finish.LENGTH if self.is_last(r, len(r.ids)) else None), None

    def is_last(self, r: Request, tokens: int) -> bool:
        """Whether a completion of so many tokens has no room for another."""
        return tokens >= r.params.max_tok or len(r.prompt) + tokens >= self._window_tok

    def _stop_string(self, r: Request) -> str | None:
        """The stop string that the last token completed; earlier ones would have ended it."""
        assert self._decode is not None, "refused when the request came"
        longest = max(len(string.encode()) for string in r.stop.strings)  # a token is >= 1 byte
        try:
            tail = self._decode(r.ids[-longest - 1 :])
        except Exception as error:
            raise SamplerError(
                f"the tokenizer failed on the last tokens {r.ids[-longest - 1 :]} of a request "
                f"with stop strings: {error!r}"
            ) from error
        at = [(tail.find(string), string) for string in r.stop.strings if string in tail]
        return min(at)[1] if at else None

"""Continuous batching over the engine's slots, one request at a time in and out.

`admit` prefills new requests into the slots that hold the longest prefix of theirs, `step` decodes
one token for all, `stop` ends some early. Single-threaded; knows no queue, future or thread
(`native_driver` does). Not here: programs (`engine`), which slot holds what (`slots`).
Invariant: a completion carries every sampled token with its log-probs and weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.serving.engine import Engine, Prefill, Rows
from clawgym_jax.serving.sampling import Knobs
from clawgym_jax.serving.slots import NO_TOKENS, Claim, SlotTable


@dataclass(slots=True)
class Request:
    """One call of `sample` or `score`, and what came of it so far."""

    request_id: str
    prompt: np.ndarray  # i32[P]
    params: SamplingParams
    stop: Stop
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    forced: np.ndarray | None = None  # i32[C], for score: the ids to teacher-force
    slot: int = -1
    cached_tok: int = 0
    cancelled: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


Finished = tuple[Request, Completion]


class _Suffix(NamedTuple):
    """What one row of a prefill computes."""

    slot: int
    source: int
    start: int
    tokens: np.ndarray  # i32[n]
    targets: np.ndarray = NO_TOKENS  # i32[n] when scoring
    temperature: float = 1.0


@dataclass(slots=True)
class DriverStats:
    """Counters since the start; the run's metrics take differences."""

    sampled_tok: int = 0
    prefilled_tok: int = 0
    cached_tok: int = 0
    steps: int = 0
    slot_steps: int = 0  # busy slots summed over steps
    busy_s: float = 0.0  # thread time with work at hand
    idle_s: float = 0.0


class Batcher:
    """The engine's state and the requests in it."""

    def __init__(self, engine: Engine, decode: Callable[[Sequence[int]], str] | None) -> None:
        self.stats = DriverStats()
        self.running: dict[int, Request] = {}
        self.version = 0
        self._engine = engine
        self._decode = decode
        self._params: Any = None
        self.reset()

    def reset(self) -> None:
        """Empty slots; what ran is forgotten."""
        self.running.clear()
        self._table = SlotTable(self._engine.config.slots)
        self._state = self._engine.init_decode_state()

    def swap(self, params: Any, version: int) -> None:
        """New weights, with nothing in flight; cached keys and values die with the old ones."""
        self._params, self.version = params, version
        self._table.forget()

    @property
    def room(self) -> int:
        """How many requests `admit` takes now."""
        return min(self._table.free, self._engine.config.prefill_batch)

    def stop(self, requests: Sequence[Request]) -> list[Finished]:
        """Ends requests early, with what they have."""
        ended = [self._finish(r, Finish.ABORT) for r in requests]
        self._deactivate(requests)
        return ended

    # --- admission ---------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request]) -> list[Finished]:
        """Prefills at most `room` requests; those that are only scored come back at once."""
        group: list[tuple[Request, Claim]] = []
        for request in requests:
            claim = self._table.claim(request.prompt)
            assert claim is not None, "more requests were admitted than there is room"
            request.slot, request.cached_tok = claim.slot, claim.prefix_tok
            self.running[claim.slot] = request
            group.append((request, claim))
        self._prefill(group)
        scored = [request for request in requests if request.forced is not None]
        self._activate([request for request in requests if request.forced is None])
        return self._score(scored) if scored else []

    def _prefill(self, group: list[tuple[Request, Claim]]) -> None:
        """Brings all prompt tokens but the last into the slots, chunk by chunk."""
        at = [claim.prefix_tok for _, claim in group]
        source = [claim.source for _, claim in group]
        while True:
            left = [len(r.prompt) - 1 - a for (r, _), a in zip(group, at, strict=True)]
            moved = [s != r.slot for (r, _), s in zip(group, source, strict=True)]
            if not any(left) and not any(moved):
                break
            size = self._engine.chunk_for(max(left))
            rows = [
                _Suffix(r.slot, s, a, r.prompt[a : a + min(size, n)])
                for (r, _), s, a, n in zip(group, source, at, left, strict=True)
            ]
            self._state, _ = self._engine.prefill(
                self._params, self._state, self._batch(rows, size)
            )
            self.stats.prefilled_tok += sum(min(size, n) for n in left)
            at = [a + min(size, n) for a, n in zip(at, left, strict=True)]
            source = [r.slot for r, _ in group]
        for request, claim in group:
            self._table.fill(request.slot, request.prompt[:-1])
            self.stats.cached_tok += claim.prefix_tok

    def _batch(self, rows: Sequence[_Suffix], size: int) -> Prefill:
        """Prompt suffixes as padded arrays."""
        b, scratch = self._engine.config.prefill_batch, self._engine.config.slots
        batch = Prefill(
            tokens=np.zeros((b, size), np.int32),
            slots=np.full(b, scratch, np.int32),
            sources=np.full(b, scratch, np.int32),
            starts=np.zeros(b, np.int32),
            targets=np.zeros((b, size), np.int32),
            temperature=np.ones(b, np.float32),
        )
        for i, row in enumerate(rows):
            n = len(row.tokens)
            batch.tokens[i, :n] = row.tokens
            batch.slots[i], batch.sources[i], batch.starts[i] = row.slot, row.source, row.start
            batch.targets[i, : len(row.targets)] = row.targets
            batch.temperature[i] = row.temperature
        return batch

    def _score(self, requests: Sequence[Request]) -> list[Finished]:
        """Teacher-forces the ids of `requests` and ends them."""
        at = [0] * len(requests)
        forced = [r.forced if r.forced is not None else r.prompt[:0] for r in requests]
        while any(a < len(f) for a, f in zip(at, forced, strict=True)):
            left = [len(f) - a for a, f in zip(at, forced, strict=True)]
            size = self._engine.chunk_for(max(left))
            rows = []
            for r, f, a in zip(requests, forced, at, strict=True):
                fed = np.concatenate([r.prompt[-1:], f[:-1]])[a : a + size]
                at_tok, targets = len(r.prompt) - 1 + a, f[a : a + size]
                rows.append(_Suffix(r.slot, r.slot, at_tok, fed, targets, r.params.temperature))
            batch = self._batch(rows, size)
            self._state, result = self._engine.prefill(self._params, self._state, batch, score=True)
            logprobs, raw = (np.asarray(x) for x in jax.device_get(result))
            for i, r in enumerate(requests):
                n = len(rows[i].tokens)
                r.ids.extend(rows[i].targets.tolist())
                r.logprobs.extend(logprobs[i, :n].tolist())
                r.raw.extend(raw[i, :n].tolist())
                r.versions.extend([self.version] * n)
                at[i] += n
        return [self._finish(r, Finish.STOP) for r in requests]

    def _activate(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        rows = self._empty_rows()
        for r in requests:
            s, p = r.slot, r.params
            rows.mask[s], rows.active[s] = True, True
            rows.length[s], rows.last[s] = len(r.prompt) - 1, r.prompt[-1]
            rows.knobs.temperature[s], rows.knobs.top_p[s] = p.temperature, p.top_p
            rows.knobs.top_k[s], rows.knobs.min_p[s] = p.top_k, p.min_p
            rows.knobs.seed[s] = p.seed & 0xFFFFFFFF
        self._state = self._engine.insert(self._state, rows)

    def _deactivate(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        rows = self._empty_rows()
        for r in requests:
            rows.mask[r.slot] = True
        self._state = self._engine.insert(self._state, rows)

    def _empty_rows(self) -> Rows:
        s = self._engine.config.slots
        return Rows(
            mask=np.zeros(s, bool),
            length=np.zeros(s, np.int32),
            last=np.zeros(s, np.int32),
            active=np.zeros(s, bool),
            knobs=Knobs(
                temperature=np.ones(s, np.float32),
                top_p=np.ones(s, np.float32),
                top_k=np.zeros(s, np.int32),
                min_p=np.zeros(s, np.float32),
                seed=np.zeros(s, np.uint32),
                step=np.zeros(s, np.int32),
            ),
        )

    # --- decoding ----------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """One token for every running request; returns those that ended with it."""
        longest = max(len(r.prompt) + len(r.ids) for r in self.running.values())
        self._state, drawn = self._engine.generate(self._params, self._state, longest)
        ids, logprobs, raw = (x.tolist() for x in jax.device_get(tuple(drawn)))
        self.stats.steps += 1
        self.stats.slot_steps += len(self.running)
        self.stats.sampled_tok += len(self.running)
        ended: list[Finished] = []
        for slot, r in list(self.running.items()):
            r.ids.append(ids[slot])
            r.logprobs.append(logprobs[slot])
            r.raw.append(raw[slot])
            r.versions.append(self.version)
            finish, stop_string = self._verdict(r)
            if finish is not None:
                ended.append(self._finish(r, finish, stop_string))
        self._deactivate([r for r, _ in ended])
        return ended

    def _verdict(self, r: Request) -> tuple[Finish | None, str | None]:
        if r.ids[-1] in r.stop.token_ids:
            return Finish.STOP, None
        if r.stop.strings and self._decode is not None:
            text = self._decode(r.ids)
            for string in r.stop.strings:
                if string in text:
                    return Finish.STOP, string
        full = len(r.prompt) + len(r.ids) >= self._engine.config.window_tok
        if len(r.ids) >= r.params.max_tok or full:
            return Finish.LENGTH, None
        return None, None

    def _finish(self, r: Request, finish: Finish, stop_string: str | None = None) -> Finished:
        """Ends a request with what it has; its slot keeps what it computed."""
        if r.slot >= 0:
            del self.running[r.slot]
            known = np.concatenate([r.prompt, np.array(r.ids[:-1], np.int32)])
            self._table.release(r.slot, known if r.ids else r.prompt[:-1])
        return r, completion_of(r, finish, stop_string)


def completion_of(r: Request, finish: Finish, stop_string: str | None = None) -> Completion:
    """Everything that was sampled for `r`."""
    return Completion(
        ids=np.array(r.ids, np.int32),
        logprobs=np.array(r.logprobs, np.float32),
        raw_logprobs=np.array(r.raw, np.float32),
        versions=np.array(r.versions, np.uint32),
        finish=finish,
        stop_string=stop_string,
        cached_tok=r.cached_tok,
    )

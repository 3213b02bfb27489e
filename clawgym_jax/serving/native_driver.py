"""The engine behind `Sampler` and `WeightSink`: one thread, continuous batching, real cancel.

The thread repeats: swap weights if asked, admit waiting requests (batched prefill into slots that
hold the longest prefix), one decode step for all, hand out what finished. Not here: programs
(`engine`), the choice of slots (`slots`).

Invariants: a completion carries every sampled token with its log-probs and weight version; a
request ends once, with a Completion or a typed error; a failure of the engine fails the requests
in it and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from clawgym_jax.core.errors import EngineRestarted, NoWeights, Overlong, SamplerError
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.serving.engine import Engine, Prefill, Rows
from clawgym_jax.serving.sampling import Knobs
from clawgym_jax.serving.slots import NO_TOKENS, Claim, SlotTable


@dataclass(slots=True)
class _Request:
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


class NativeDriver:
    """Implements core.interfaces.Sampler and WeightSink. Use as a context manager."""

    def __init__(self, engine: Engine, decode: Callable[[Sequence[int]], str] | None = None):
        """decode: ids -> text, needed for stop strings only."""
        self._engine = engine
        self._decode = decode
        self._state = engine.init_decode_state()
        self._table = SlotTable(engine.config.slots)
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._params: Any = None
        self._version = 0
        self._pending: tuple[Any, int, threading.Event] | None = None
        self._wake = threading.Condition()
        self._closed = False
        self._pool: dict[str, _Request] = {}
        self.stats = DriverStats()
        self._thread = threading.Thread(target=self._run, name="native-driver", daemon=True)
        self._thread.start()

    # --- Sampler -----------------------------------------------------------------------------

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        """See core.interfaces.Sampler. Cancelling the awaiting task cancels the request."""
        if stop.strings and self._decode is None:
            raise SamplerError("stop strings need a driver with `decode`; pass the tokenizer's")
        return await self._submit(request_id, prompt_ids, params, stop, None)

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        """Log-probs that the current weights give `ids` after `prompt_ids`."""
        forced = np.asarray(ids, np.int32)
        if not len(forced):
            raise SamplerError("score needs at least one token id, got none")
        params = SamplingParams(temperature=temperature, max_tok=len(forced))
        return await self._submit(f"score-{id(forced)}", prompt_ids, params, Stop(), forced)

    def cancel(self, request_id: str) -> None:
        """The request's `sample` returns what it has, with finish=abort, within two steps."""
        with self._wake:
            request = self._pool.get(request_id)
            if request is not None:
                request.cancelled = True
                self._wake.notify()

    async def _submit(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        stop: Stop,
        forced: np.ndarray | None,
    ) -> Completion:
        prompt = np.ascontiguousarray(prompt_ids, np.int32)
        window = self._engine.config.window_tok
        if not len(prompt):
            raise SamplerError("expected a prompt of at least one token, got none")
        if len(prompt) + (len(forced) if forced is not None else 1) > window:
            raise Overlong(len(prompt), window)
        loop = asyncio.get_running_loop()
        request = _Request(request_id, prompt, params, stop, loop.create_future(), loop, forced)
        with self._wake:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            if self._params is None and self._pending is None:
                raise NoWeights("no weights were published yet; publish before sampling")
            if request_id in self._pool:
                raise SamplerError(f"request {request_id!r} is already in flight; ids are unique")
            self._pool[request_id] = request
            self._waiting.append(request)
            self._wake.notify()
        try:
            return await request.future
        except asyncio.CancelledError:
            self.cancel(request_id)
            raise

    # --- WeightSink --------------------------------------------------------------------------

    def publish(self, params: Any, version: int) -> None:
        """Drains what is in flight, swaps, then serves `version`. Blocks until it is served."""
        if version <= self._version:
            raise ValueError(
                f"versions rise: version {self._version} is served already, got {version}"
            )
        done = threading.Event()
        with self._wake:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            self._pending = (self._engine.load_params(params), version, done)
            self._wake.notify()
        done.wait()
        if self._closed:
            raise EngineRestarted("the driver was closed during a weight swap")

    @property
    def version(self) -> int:
        return self._version

    def close(self) -> None:
        """Ends the thread; requests in flight fail with EngineRestarted."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> NativeDriver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            start = time.perf_counter()
            with self._wake:
                while not (self._closed or self._waiting or self._running or self._pending):
                    self._wake.wait()
                closed = self._closed
            self.stats.idle_s += time.perf_counter() - start
            if closed:
                self._fail_all(EngineRestarted("the driver was closed"))
                if self._pending:
                    self._pending[2].set()
                return
            start = time.perf_counter()
            try:
                self._turn()
            except Exception as error:
                self._restart(error)
            self.stats.busy_s += time.perf_counter() - start

    def _turn(self) -> None:
        """One round: swap, reap, admit, step."""
        if self._pending and not self._running:
            self._swap()
        self._reap()
        if not self._pending:
            self._admit()
        if self._running:
            self._step()

    def _swap(self) -> None:
        with self._wake:
            assert self._pending is not None
            self._params, self._version, done = self._pending
            self._pending = None
        self._table.forget()
        done.set()

    def _reap(self) -> None:
        """Ends cancelled requests, waiting or running."""
        with self._wake:
            gone = [r for r in self._waiting if r.cancelled]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            self._finish(request, Finish.ABORT)
        stopped = [r for r in self._running.values() if r.cancelled]
        for request in stopped:
            self._finish(request, Finish.ABORT)
        self._deactivate(stopped)

    # --- admission ---------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefills waiting requests, at most a batch at a time, while slots are free."""
        while True:
            group: list[tuple[_Request, Claim]] = []
            with self._wake:
                while self._waiting and len(group) < self._engine.config.prefill_batch:
                    claim = self._table.claim(self._waiting[0].prompt)
                    if claim is None:
                        break
                    request = self._waiting.popleft()
                    request.slot, request.cached_tok = claim.slot, claim.prefix_tok
                    self._running[claim.slot] = request
                    group.append((request, claim))
            if not group:
                return
            self._prefill(group)
            scored = [request for request, _ in group if request.forced is not None]
            if scored:
                self._score(scored)
            self._activate([request for request, _ in group if request.forced is None])

    def _prefill(self, group: list[tuple[_Request, Claim]]) -> None:
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

    def _score(self, requests: list[_Request]) -> None:
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
                r.versions.extend([self._version] * n)
                at[i] += n
        for r in requests:
            self._finish(r, Finish.STOP)

    def _activate(self, requests: list[_Request]) -> None:
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

    def _deactivate(self, requests: list[_Request]) -> None:
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

    def _step(self) -> None:
        longest = max(len(r.prompt) + len(r.ids) for r in self._running.values())
        self._state, drawn = self._engine.generate(self._params, self._state, longest)
        ids, logprobs, raw = (x.tolist() for x in jax.device_get(tuple(drawn)))
        self.stats.steps += 1
        self.stats.slot_steps += len(self._running)
        self.stats.sampled_tok += len(self._running)
        ended: list[_Request] = []
        for slot, r in list(self._running.items()):
            r.ids.append(ids[slot])
            r.logprobs.append(logprobs[slot])
            r.raw.append(raw[slot])
            r.versions.append(self._version)
            finish, stop_string = self._verdict(r)
            if finish is not None:
                self._finish(r, finish, stop_string)
                ended.append(r)
        self._deactivate(ended)

    def _verdict(self, r: _Request) -> tuple[Finish | None, str | None]:
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

    def _finish(self, r: _Request, finish: Finish, stop_string: str | None = None) -> None:
        """Ends a request with what it has; its slot keeps what it computed."""
        if r.slot >= 0:
            del self._running[r.slot]
            ids = np.array(r.ids, np.int32)
            known = np.concatenate([r.prompt, ids[:-1]]) if len(ids) else r.prompt[:-1]
            self._table.release(r.slot, known)
        completion = Completion(
            ids=np.array(r.ids, np.int32),
            logprobs=np.array(r.logprobs, np.float32),
            raw_logprobs=np.array(r.raw, np.float32),
            versions=np.array(r.versions, np.uint32),
            finish=finish,
            stop_string=stop_string,
            cached_tok=r.cached_tok,
        )
        self._resolve(r, completion)

    def _resolve(self, r: _Request, result: Completion | SamplerError) -> None:
        with self._wake:
            self._pool.pop(r.request_id, None)

        def deliver() -> None:
            if r.future.done():
                return
            if isinstance(result, Completion):
                r.future.set_result(result)
            else:
                r.future.set_exception(result)

        if not r.loop.is_closed():
            r.loop.call_soon_threadsafe(deliver)

    # --- faults ------------------------------------------------------------------------------

    def _fail_all(self, error: SamplerError) -> None:
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
        for r in [*self._running.values(), *waiting]:
            self._resolve(r, error)
        self._running.clear()

    def _restart(self, error: Exception) -> None:
        """Fails the requests that were in the engine and starts it with empty slots."""
        for r in self._running.values():
            self._resolve(r, EngineRestarted(f"the engine failed and was restarted: {error!r}"))
        self._running.clear()
        self._table = SlotTable(self._engine.config.slots)
        self._state = self._engine.init_decode_state()

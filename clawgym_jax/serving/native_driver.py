"""The engine behind `Sampler` and `WeightSink`: one thread, continuous batching, real cancel.

The thread repeats: swap weights if asked, admit waiting requests (batched prefill into slots that
hold the longest prefix), one decode step for all, hand out what finished. Not here: batching
(`batcher`), programs (`engine`).

What is in flight when weights are swapped: `drain` lets it finish first, `continue` swaps between
two steps and goes on (each token carries its version, the keys and values serve nobody else),
`abort` ends it with finish=abort.
Invariants: a request ends once, with a Completion or a typed error; a failure of the engine fails
the requests in it and nothing else; by default weights never change under a request.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clawgym_jax.core.errors import (
    EngineRestarted,
    NoWeights,
    Overlong,
    SamplerError,
)
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.serving.batcher import Batcher
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.request import Finished, Request
from clawgym_jax.serving.state import SwapPolicy


class NativeDriver:
    """Implements core.interfaces.Sampler and WeightSink. Use as a context manager."""

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str] | None = None,
        swap_policy: SwapPolicy | None = None,
    ) -> None:
        """decode: ids -> text, needed for stop strings only. swap_policy: else the engine's."""
        self._swap_policy = swap_policy or engine.config.swap_policy
        self._engine = engine
        self._decode = decode
        self._vocabulary = engine.model.vocab_size
        self._batcher = Batcher(engine, decode)
        self.stats = self._batcher.stats
        self._waiting: deque[Request] = deque()
        self._pending: tuple[Any, int, threading.Event] | None = None
        self._wake = threading.Condition()
        self._closed = False
        self._taken: list[Request] = []  # out of the queue, not yet in the engine
        self._scores = itertools.count()
        self._pool: dict[str, Request] = {}
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
        return await self._submit(f"score-{next(self._scores)}", prompt_ids, params, Stop(), forced)

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
        if prompt.ndim != 1 or not len(prompt):
            raise SamplerError(f"expected a prompt of token ids [P], P >= 1, got {prompt.shape}")
        for name, ids in (("prompt", prompt), ("scored", forced)):
            if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
                raise SamplerError(
                    f"expected {name} token ids in [0, {self._vocabulary}), got {ids.min()} to "
                    f"{ids.max()}: is it the tokenizer of another model?"
                )
        if len(prompt) + (len(forced) if forced is not None else 1) > window:
            raise Overlong(len(prompt), window)
        loop = asyncio.get_running_loop()
        request = Request(
            request_id,
            prompt,
            params,
            stop,
            loop.create_future(),
            loop,
            forced,
            arrived_s=time.perf_counter(),
        )
        with self._wake:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            if self._batcher.version == 0 and self._pending is None:
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
        """Swaps by the policy, then serves `version`. Blocks until it is served."""
        if version <= self._batcher.version:
            raise ValueError(
                f"versions rise: version {self._batcher.version} is served already, got {version}"
            )
        done = threading.Event()
        with self._wake:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            if self._pending:
                raise ValueError(f"version {self._pending[1]} is being published; wait for it")
            self._pending = (self._engine.load_params(params), version, done)
            self._wake.notify()
        done.wait()
        if self._closed:
            raise EngineRestarted("the driver was closed during a weight swap")

    @property
    def version(self) -> int:
        return self._batcher.version

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
                while not (self._closed or self._waiting or self._batcher.busy or self._pending):
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
        """One round: swap, reap, admit, prefill, step."""
        if self._pending:
            self._swap_if_due()
        self._reap()
        while not self._pending and self._take():
            self._batcher.admit(self._taken)
            self._taken = []
            self._resolve_all(self._batcher.advance())
        if self._batcher.filling:
            self._resolve_all(self._batcher.advance())
        if self._batcher.running:
            self._resolve_all(self._batcher.step())

    def _take(self) -> bool:
        """Takes the next waiting requests that there is room for."""
        with self._wake:
            self._taken = self._batcher.choose(self._waiting) if self._waiting else []
            for request in self._taken:
                self._waiting.remove(request)
        return bool(self._taken)

    def _swap_if_due(self) -> None:
        if self._batcher.busy and self._swap_policy == "drain":
            return
        if self._swap_policy == "abort":
            self._resolve_all(self._batcher.stop(self._batcher.requests()))
        self._swap()

    def _swap(self) -> None:
        with self._wake:
            assert self._pending is not None
            params, version, done = self._pending
            self._pending = None
        self._batcher.swap(params, version)
        done.set()

    def _reap(self) -> None:
        """Ends cancelled requests, waiting or running."""
        with self._wake:
            gone = [r for r in self._waiting if r.cancelled]
            for request in gone:
                self._waiting.remove(request)
        self._resolve_all([(r, r.completion(Finish.ABORT)) for r in gone])
        stopped = [r for r in self._batcher.requests() if r.cancelled]
        if stopped:
            self._resolve_all(self._batcher.stop(stopped))

    def _resolve_all(self, finished: Sequence[Finished]) -> None:
        for request, completion in finished:
            self._resolve(request, completion)

    def _resolve(self, r: Request, result: Completion | SamplerError) -> None:
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
        for r in [*self._batcher.requests(), *waiting]:
            self._resolve(r, error)
        self._batcher.running.clear()
        self._batcher.filling.clear()

    def _restart(self, error: Exception) -> None:
        """Fails the requests that were in the engine and starts it with empty slots."""
        lost = {r.request_id: r for r in [*self._taken, *self._batcher.requests()]}
        self.stats.restarts += 1
        self._taken = []
        for r in lost.values():
            self._resolve(r, EngineRestarted(f"the engine failed and was restarted: {error!r}"))
        try:
            self._batcher.reset()
        except Exception:  # no memory for empty slots: nothing can be served any more
            with self._wake:
                self._closed = True

"""The engine behind `Sampler` and `WeightSink`: one thread, continuous batching, real cancel.

The thread turns rounds (`rounds`): swap weights if asked, admit waiting requests (batched prefill
into slots that hold the longest prefix), one decode step for all, hand out what finished. Not here:
batching (`batcher`), programs (`engine`), what a request must be (`asking`).
Invariants: a request ends once, with a Completion or a typed error; a failure of the engine fails
the requests in it and nothing else; by default weights never change under a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, NoWeights, SamplerError
from clawgym_jax.core.types import Completion, SamplingParams, Stop
from clawgym_jax.serving.asking import Asking
from clawgym_jax.serving.batcher import Batcher
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.request import Finished, Request
from clawgym_jax.serving.rounds import Rounds
from clawgym_jax.serving.state import SwapPolicy


class NativeDriver(Asking):
    """Implements core.interfaces.Sampler and WeightSink. Use as a context manager."""

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str] | None = None,
        swap_policy: SwapPolicy | None = None,
    ) -> None:
        """decode: ids -> text, needed for stop strings only. swap_policy: else the engine's."""
        super().__init__(engine.model.vocab_size, engine.config.window_tok, decode is not None)
        self._engine = engine
        self._batcher = Batcher(engine, decode, run_ahead=True)
        self.stats = self._batcher.stats
        self._wake = threading.Condition()
        policy = swap_policy or engine.config.swap_policy
        self._rounds = Rounds(self._batcher, policy, self._wake, self._resolve_all)
        self._closed = False
        self._pool: dict[str, Request] = {}
        self._thread = threading.Thread(target=self._run, name="native-driver", daemon=True)
        self._thread.start()

    # --- Sampler -----------------------------------------------------------------------------

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
        prompt: np.ndarray,
        params: SamplingParams,
        stop: Stop,
        forced: np.ndarray | None,
    ) -> Completion:
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
            if self._batcher.version == 0 and self._rounds.pending is None:
                raise NoWeights("no weights were published yet; publish before sampling")
            if request_id in self._pool:
                raise SamplerError(f"request {request_id!r} is already in flight; ids are unique")
            self._pool[request_id] = request
            self._rounds.waiting.append(request)
            self._wake.notify()
        try:
            return await request.future
        except asyncio.CancelledError:
            self.cancel(request_id)
            raise

    # --- WeightSink --------------------------------------------------------------------------

    def publish(self, params: Any, version: int) -> None:
        """Swaps by the policy, then serves `version`. Blocks until it is served."""
        self._rounds.require_newer(version)
        loaded = self._engine.load_params(params)
        with self._wake:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            self._rounds.require_newer(version)
            self._rounds.pending = (loaded, version)
            self._wake.notify_all()
            self._wake.wait_for(lambda: self.version >= version or self._closed)
            if self.version < version:
                raise EngineRestarted("the driver was closed during a weight swap")

    @property
    def version(self) -> int:
        return self._batcher.version

    def close(self) -> None:
        """Ends the thread; requests in flight fail with EngineRestarted."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
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
                self._wake.wait_for(self._has_work)
                closed = self._closed
            self.stats.idle_s += time.perf_counter() - start
            if closed:
                self._fail_all(EngineRestarted("the driver was closed"))
                return
            start = time.perf_counter()
            try:
                self._rounds.turn()
            except Exception as error:
                self._restart(error)
            self.stats.busy_s += time.perf_counter() - start

    def _has_work(self) -> bool:
        rounds = self._rounds
        return self._closed or self._batcher.busy or bool(rounds.waiting or rounds.pending)

    def _resolve_all(self, finished: Sequence[Finished]) -> None:
        for request, result in finished:
            self._resolve(request, result)

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

        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
            r.loop.call_soon_threadsafe(deliver)

    # --- faults ------------------------------------------------------------------------------

    def _fail_all(self, error: SamplerError) -> None:
        with self._wake:
            waiting = list(self._rounds.waiting)
            self._rounds.waiting.clear()
        for r in [*self._batcher.requests(), *waiting]:
            self._resolve(r, error)
        self._batcher.running.clear()
        self._batcher.filling.clear()

    def _restart(self, error: Exception) -> None:
        """Fails the requests that were in the engine and starts it with empty slots."""
        lost = self._rounds.in_engine()
        self.stats.restarts += 1
        self._rounds.taken = []
        for r in lost:
            self._resolve(r, EngineRestarted(f"the engine failed and was restarted: {error!r}"))
        try:
            self._batcher.reset()
        except Exception:  # no memory for empty slots: nothing can be served any more
            with self._wake:
                self._closed = True
                self._wake.notify_all()

"""What both JetStream drivers show to their users: a `Sampler` on an event loop of its own.

Requests are checked (`asking`) before anything of them reaches the orchestrator, which would cut a
long prompt silently. The loop lives in a thread, because the orchestrator kills its process when a
client's loop is closed with a request in flight.
Not here: how a request is answered (`jetstream_driver` in process, `jetstream_process` over gRPC).
Invariant: a request ends once, with a Completion or a typed error, also when the driver is closed.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, SamplerError
from clawgym_jax.core.types import Completion, SamplingParams, Stop
from clawgym_jax.serving.asking import Asking
from clawgym_jax.serving.request import DriverStats

_COMING, _CANCELLED = 0, -1  # in place of a handle that is not known yet


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of `sample` or `score`."""

    request_id: str
    prompt: np.ndarray  # i32[P]
    params: SamplingParams
    stop: Stop
    forced: np.ndarray | None = None  # i32[C]: the ids to score


class Front(Asking):
    """Implements core.interfaces.Sampler on top of `_answer`. Use as a context manager."""

    def __init__(self, vocabulary: int, window_tok: int, strings: bool) -> None:
        """strings: whether the engine can decode, for stop strings."""
        super().__init__(vocabulary, window_tok, strings)
        self._pool: dict[str, int] = {}  # request id -> handle, or one of the two above
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jetstream-client", daemon=True
        )
        self._thread.start()

    @abc.abstractmethod
    async def _answer(self, ask: Ask) -> Completion:
        """Runs on the driver's loop; calls `_handle_is` once; cancels when it is cancelled."""

    @abc.abstractmethod
    def _cancel_handle(self, handle: int) -> None:
        """From any thread."""

    @abc.abstractmethod
    def publish(self, params: Any, version: int) -> None:
        """See core.interfaces.WeightSink. Blocks until `version` is served."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """That is served; 0 = none yet."""

    @property
    @abc.abstractmethod
    def stats(self) -> DriverStats:
        """Counters since the start."""

    def cancel(self, request_id: str) -> None:
        """The request's `sample` returns what it has, with finish=abort, within two steps."""
        with self._lock:
            handle = self._pool.get(request_id)
            if handle == _COMING:
                self._pool[request_id] = _CANCELLED
        if handle is not None and handle > _COMING:
            self._cancel_handle(handle)

    async def _submit(
        self,
        request_id: str,
        prompt: np.ndarray,
        params: SamplingParams,
        stop: Stop,
        forced: np.ndarray | None,
    ) -> Completion:
        with self._lock:
            if self._closed:
                raise EngineRestarted("the driver is closed; start a new one")
            if request_id in self._pool:
                raise SamplerError(f"request {request_id!r} is already in flight; ids are unique")
            self._pool[request_id] = _COMING
            ask = Ask(request_id, prompt, params, stop, forced)
            answer = asyncio.run_coroutine_threadsafe(self._answered(ask), self._loop)
        return await asyncio.wrap_future(answer)

    async def _answered(self, ask: Ask) -> Completion:
        try:
            return await self._answer(ask)
        finally:
            with self._lock:
                self._pool.pop(ask.request_id, None)

    def _handle_is(self, ask: Ask, handle: int) -> bool:
        """From now on `cancel` finds it. Returns whether it was cancelled before."""
        with self._lock:
            cancelled = self._pool[ask.request_id] == _CANCELLED
            self._pool[ask.request_id] = handle
        return cancelled

    # --- closing -----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends everything; requests in flight fail with EngineRestarted. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._close()
            asyncio.run_coroutine_threadsafe(_rest(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @abc.abstractmethod
    def _close(self) -> None:
        """Ends the engine; the answers that are due end with typed errors."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _rest() -> None:
    """Waits until every answer was given."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)

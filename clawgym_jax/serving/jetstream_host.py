"""The stock orchestrator over our engine, kept alive: Decode streams in, rows out.

A thread of the orchestrator that fails takes all of them with it: they are stopped, the requests
in them get EngineRestarted, and a new orchestrator starts. Its own `stop` leaves clients hanging;
here their streams are ended through the context that stands in for the RPC's.
Not here: what a request is (`jetstream_engine`), who sends it (`jetstream_driver`,
`jetstream_server`).
Invariant: after `close` none of the orchestrator's threads is left and every stream has ended.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from clawgym_jax.core.errors import EngineRestarted, Overloaded
from clawgym_jax.serving import jetstream_shim
from clawgym_jax.serving.jetstream_engine import JetStreamEngine


class Call:
    """What the orchestrator sees of an RPC, so that its stream can be ended from here too."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(None)

    async def abort(self, _: Any, details: str) -> None:
        raise Overloaded(details)


class Host:
    """Owns the orchestrator. `decode` and `cancel` may be called from an event loop."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._orchestrators = jetstream_shim.load().orchestrator
        self._engine = engine
        self._calls: dict[int, Call] = {}  # by handle
        self._lock = threading.Lock()
        self._closed = False
        self._restarting: threading.Thread | None = None
        self._start()

    async def decode(self, request: Any) -> AsyncGenerator[Any, None]:
        """DecodeResponses of the stock orchestrator. Ends early where a stream was ended here."""
        handle, call = handle_of(request), Call()
        with self._lock:
            self._calls[handle] = call
            orchestrator = self._orchestrator
        try:
            async for response in orchestrator.Decode(request, call):
                yield response
        except concurrent.futures.CancelledError:
            return
        finally:
            with self._lock:
                self._calls.pop(handle, None)

    def cancel(self, handle: int) -> None:
        """Ends the request within two steps, at once if it has no slot yet."""
        if self._engine.cancel(handle):
            with self._lock:
                call = self._calls.get(handle)
            if call is not None:
                call.end()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            restarting = self._restarting
        if restarting is not None:
            restarting.join()
        self._driver.stop()
        self._engine.reset(EngineRestarted("the driver was closed"), closed=True)
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.end()

    # --- life of the orchestrator ------------------------------------------------------------

    def _start(self) -> None:
        self._driver = jetstream_shim.start_driver(self._engine, self._on_failure)
        self._orchestrator = self._orchestrators.LLMOrchestrator(self._driver)

    def _on_failure(self, error: Exception) -> None:
        """Called by the failing thread, which `stop` waits for: another one has to restart."""
        with self._lock:
            if self._closed or self._restarting is not None:
                return
            self._restarting = threading.Thread(
                target=self._restart, args=(error,), name="jetstream-restart", daemon=True
            )
        self._restarting.start()

    def _restart(self, error: Exception) -> None:
        why = EngineRestarted(f"JetStream's orchestrator failed and was restarted: {error!r}")
        self._engine.stats.restarts += 1
        self._driver.stop()
        self._engine.reset(why)
        with self._lock:
            self._restarting = None
            lost = list(self._calls.values())  # also those that came to it after it had stopped
            if not self._closed:
                self._start()
        for call in lost:
            call.end()


def handle_of(request: Any) -> int:
    return int(request.token_content.token_ids[-1])


def rows_of(response: Any) -> list[list[int]]:
    """The integers of a DecodeResponse."""
    return [list(sample.token_ids) for sample in response.stream_content.samples]

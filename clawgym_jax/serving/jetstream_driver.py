"""JetStream's stock orchestrator in this process, behind `Sampler` and `WeightSink`.

Gives the tokens and log-probs of the native driver; each costs more of Python (serving.md). To
choose it is to run the orchestrator that the paper's card names. In a process of its own it is
`jetstream_process`.
Not here: the engine (`jetstream_engine`), the orchestrator (`jetstream_host`).
Invariant: what is returned came as rows through the orchestrator's Decode stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from clawgym_jax.core.types import Completion
from clawgym_jax.serving import jetstream_shim
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.jetstream_engine import JetStreamEngine
from clawgym_jax.serving.jetstream_front import Ask, Front
from clawgym_jax.serving.jetstream_host import Host, rows_of
from clawgym_jax.serving.jetstream_rows import Reader
from clawgym_jax.serving.request import DriverStats, Request
from clawgym_jax.serving.state import SwapPolicy


class JetStreamDriver(Front):
    """Implements core.interfaces.Sampler and WeightSink. Use as a context manager."""

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str] | None = None,
        swap_policy: SwapPolicy | None = None,
    ) -> None:
        """decode: ids -> text, needed for stop strings only. swap_policy: else the engine's."""
        self._engine = JetStreamEngine(engine, decode, swap_policy)
        self._host = Host(self._engine)
        super().__init__(engine.model.vocab_size, engine.config.window_tok, decode is not None)

    @property
    def stats(self) -> DriverStats:
        return self._engine.stats

    @property
    def version(self) -> int:
        return self._engine.version

    def publish(self, params: Any, version: int) -> None:
        self._engine.publish(params, version)

    async def _answer(self, ask: Ask) -> Completion:
        request = request_of(ask)
        entry = self._engine.submit(request)
        if self._handle_is(ask, entry.handle):
            self._cancel_handle(entry.handle)
        reader = Reader()
        try:
            message = jetstream_shim.wire().request(entry.handle, ask.params.max_tok)
            async with contextlib.aclosing(self._host.decode(message)) as responses:
                async for response in responses:
                    reader.add_all(rows_of(response))
            return reader.completion(entry.outcome())
        finally:
            self._engine.forget(entry.handle)

    def _cancel_handle(self, handle: int) -> None:
        self._host.cancel(handle)

    def _close(self) -> None:
        self._host.close()


def request_of(ask: Ask) -> Request:
    """The engine's record of it. Its future is not used: answers come as rows."""
    loop = asyncio.get_running_loop()
    return Request(
        ask.request_id,
        ask.prompt,
        ask.params,
        ask.stop,
        loop.create_future(),
        loop,
        ask.forced,
        arrived_s=time.perf_counter(),
    )

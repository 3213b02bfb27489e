"""JetStream in a supervised process of its own, behind `Sampler` and `WeightSink`, over gRPC.

Each request is a real Decode RPC to `jetstream_server` on a unix socket; what its messages lack
goes beside it (`jetstream_side`). A server that dies (a stock orchestrator may kill its own) is
started again with the last weights; the requests in it get EngineRestarted, later ones wait.
The server needs the chips to itself: on a TPU host that also trains, use `jetstream_driver`.
Invariants: the server never outlives this process; after `close` neither it nor its files are left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from clawgym_jax.core.errors import ConfigError, EngineRestarted
from clawgym_jax.core.types import Completion
from clawgym_jax.model import hf_weights
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel_serving import ServingMeshConfig
from clawgym_jax.serving import jetstream_shim, jetstream_side
from clawgym_jax.serving.jetstream_front import Ask, Front
from clawgym_jax.serving.jetstream_link import Link
from clawgym_jax.serving.jetstream_rows import Reader
from clawgym_jax.serving.jetstream_side import ServerSpec
from clawgym_jax.serving.request import DriverStats
from clawgym_jax.serving.state import EngineConfig

_SOCKET_BYTES = 100  # of a path; the system's limit is 108
_TRIES = 3  # starts that may fail in a row
_STOP_S = 30.0  # for a server to end by itself
_LOG_CHARS = 2000  # of the server's output, in an error


class JetStreamProcess(Front):
    """Implements core.interfaces.Sampler and WeightSink. Use as a context manager."""

    def __init__(
        self,
        model_folder: Path,
        model: Qwen3Config,
        config: EngineConfig,
        mesh: ServingMeshConfig | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        """model: the folder's, with the types of the parameters that will be published."""
        jetstream_shim.wire()
        strings = (model_folder / "tokenizer.json").is_file()
        super().__init__(model.vocab_size, config.window_tok, strings)
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="jetstream-"))
        self._log = (self._folder / "server.log").open("ab", buffering=0)
        self._spec = ServerSpec(
            socket="",
            model=str(model_folder.resolve()),
            dtype=np.dtype(model.dtype).name,
            param_dtype=np.dtype(model.param_dtype).name,
            engine=config,
            mesh=mesh or ServingMeshConfig(),
            strings=strings,
            scratch=str(self._folder),
        )
        self._lives = 0
        self._weights: tuple[Path, int] | None = None  # published last
        self._version = 0
        self._before = DriverStats()  # what servers that are gone had counted
        self._seen = DriverStats()
        self._changed = threading.Condition()
        self._publishing = threading.Lock()  # weights reach a server once
        self._server: Link | None = None  # that is up
        self._failed: Exception | None = None  # why none will be
        self._supervisor = threading.Thread(
            target=self._supervise, name="jetstream-supervisor", daemon=True
        )
        self._supervisor.start()
        try:
            self._wait_for_server()
        except BaseException:
            self.close()
            raise

    # --- requests ----------------------------------------------------------------------------

    async def _answer(self, ask: Ask) -> Completion:
        """The exchange goes on when nobody waits any more: it has to tell the server so."""
        dropped = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(ask, dropped))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            dropped.set()
            exchange.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.cancel(ask.request_id)
            raise

    async def _exchange(self, ask: Ask, dropped: asyncio.Event) -> Completion:
        server, reply = await self._put(jetstream_side.pack_ask(ask))
        handle = jetstream_side.unpack(reply)["handle"]
        if dropped.is_set() or self._handle_is(ask, handle):
            await self._send_cancel(handle)
        reader = Reader()
        await server.decode(handle, ask.params.max_tok, reader)
        taken = await server.call(jetstream_side.TAKE, jetstream_side.pack(handle=handle))
        return reader.completion(jetstream_side.unpack_outcome(taken))

    async def _put(self, data: bytes) -> tuple[Link, bytes]:
        """Hands a request to the server; to the next one if that has just died."""
        while True:
            up = self._up()
            server = up if up is not None else await asyncio.to_thread(self._wait_for_server)
            try:
                return server, await server.call(jetstream_side.PUT, data)
            except EngineRestarted:
                if self._closed:
                    raise

    def _cancel_handle(self, handle: int) -> None:
        asyncio.run_coroutine_threadsafe(self._send_cancel(handle), self._loop)

    async def _send_cancel(self, handle: int) -> None:
        server = self._up()
        if server is not None:
            await server.call(jetstream_side.CANCEL, jetstream_side.pack(handle=handle))

    # --- weights and counters ----------------------------------------------------------------

    def publish(self, params: Any, version: int) -> None:
        """Writes them to a folder that the server reads. Blocks until `version` is served."""
        if version <= self._version:
            raise ValueError(
                f"versions rise: version {self._version} is served already, got {version}"
            )
        if self._closed:
            raise EngineRestarted("the driver is closed; start a new one")
        folder = self._folder / f"weights-{version}"
        hf_weights.write(folder, self._model, params)
        old = self._weights
        try:
            sent = self._take_over(folder, version)
        except Exception:
            self._weights = old
            shutil.rmtree(folder)
            raise
        if not sent:
            self._wait_for_server()
        self._version = version
        if old is not None:
            shutil.rmtree(old[0])

    def _take_over(self, folder: Path, version: int) -> bool:
        """Whether the server has the weights; if it died, the next one starts with them."""
        with self._publishing:
            self._weights = (folder, version)
            server = self._up()
            if server is None:
                return False
            try:
                self._send_weights(server)
            except EngineRestarted:
                return False
        return True

    def _send_weights(self, server: Link) -> None:
        if self._weights is not None:
            folder, version = self._weights
            data = jetstream_side.pack(folder=str(folder), version=version)
            jetstream_side.unpack(self._on_loop(server.call(jetstream_side.PUBLISH, data)))

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> DriverStats:
        """Counters of all servers so far; what a dead one counted last may be missing."""
        server = self._up()
        if server is not None and not self._closed:
            try:
                data = self._on_loop(server.call(jetstream_side.STATE, jetstream_side.pack()))
                self._seen = DriverStats(**jetstream_side.unpack(data)["stats"])
            except EngineRestarted:
                pass
        return _sum(self._before, self._seen)

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- the process -------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Starts a server, and another one whenever it ends."""
        failures = 0
        try:
            while not self._closed:
                failures = 0 if self._live_once() else failures + 1
                if failures == _TRIES:
                    raise ConfigError(f"the JetStream process does not start: {self._tail()}")
        except Exception as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _live_once(self) -> bool:
        """One server from its start to its end; whether it came up."""
        server = self._next_server()
        try:
            up = self._bring_up(server)
            if not up:
                server.process.kill()
            server.process.wait()
        except BaseException:
            server.process.kill()
            raise
        finally:
            self._is_down(server)
        return up

    def _next_server(self) -> Link:
        self._lives += 1
        socket = str(self._folder / f"s{self._lives}")
        if len(os.fsencode(socket)) > _SOCKET_BYTES:
            raise ConfigError(f"TMPDIR: expected a shorter path, got a socket at {socket}")
        return Link(dataclasses.replace(self._spec, socket=socket), self._folder, self._log)

    def _bring_up(self, server: Link) -> bool:
        if not self._on_loop(server.connect(self._start_timeout_s, lambda: self._closed)):
            return False
        with self._publishing:
            try:
                self._send_weights(server)
            except EngineRestarted:
                return False
            with self._changed:
                if not self._closed:
                    self._server = server
                self._changed.notify_all()
        return self._server is server

    def _is_down(self, server: Link) -> None:
        with self._changed:
            self._server = None
        server.process.wait()
        self._on_loop(server.disconnect())
        assert server.process.stdin is not None
        server.process.stdin.close()
        if not self._closed:
            self._before, self._seen = _sum(self._before, self._seen), DriverStats()
            self._before.restarts += 1

    def _up(self) -> Link | None:
        server = self._server
        return server if server is not None and server.alive else None

    def _wait_for_server(self) -> Link:
        with self._changed:
            self._changed.wait_for(lambda: self._up() or self._failed or self._closed)
            server = self._up()
            if server is None:
                raise self._failed or EngineRestarted("the driver was closed")
            return server

    def _tail(self) -> str:
        text = (self._folder / "server.log").read_text(encoding="utf-8", errors="replace")
        return text[-_LOG_CHARS:]

    def _close(self) -> None:
        with self._changed:
            server = self._server
            self._changed.notify_all()
        if server is not None:
            server.stop(_STOP_S)
        self._supervisor.join()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # the server does so too


def _sum(a: DriverStats, b: DriverStats) -> DriverStats:
    names = [field.name for field in dataclasses.fields(DriverStats)]
    return DriverStats(**{name: getattr(a, name) + getattr(b, name) for name in names})

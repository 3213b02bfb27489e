"""One life of the server process (`jetstream_server`), and the gRPC channel to it.

A server that cannot be reached is killed: what is left of it is of no use, and its supervisor
(`jetstream_process`) waits for its end. Not here: when to start one, what to send.
Invariant: what fails on the way is an EngineRestarted, whatever gRPC calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from clawgym_jax.core.errors import EngineRestarted
from clawgym_jax.serving import jetstream_shim, jetstream_side
from clawgym_jax.serving.jetstream_host import rows_of
from clawgym_jax.serving.jetstream_rows import Reader
from clawgym_jax.serving.jetstream_side import ServerSpec

_GRACE_S = 5.0  # for RPCs to a server that ended


class Link:
    """One life of a server. Its coroutines run on the driver's loop."""

    def __init__(self, spec: ServerSpec, folder: Path, log: IO[bytes]) -> None:
        spec.write(folder / "spec.json")
        self._spec = spec
        self._unreachable = self._stopping = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clawgym_jax.serving.jetstream_server", folder / "spec.json"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us; it ends when its standard input does
        )

    async def connect(self, timeout_s: float, unwanted: Callable[[], bool]) -> bool:
        """Whether it came up."""
        wire, target = jetstream_shim.wire(), f"unix:{self._spec.socket}"
        self._channel = wire.grpc.aio.insecure_channel(target, options=jetstream_side.GRPC_OPTIONS)
        self._decode = wire.services.OrchestratorStub(self._channel).Decode
        self._calls = {
            name: self._channel.unary_unary(f"/{jetstream_side.SERVICE}/{name}")
            for name in jetstream_side.METHODS
        }
        deadline_s = time.monotonic() + timeout_s
        while self.alive and not unwanted() and time.monotonic() < deadline_s:
            if await asyncio.to_thread(os.path.exists, self._spec.socket):
                await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
                return True
            await asyncio.sleep(0.05)
        return False

    @property
    def alive(self) -> bool:
        return not self._unreachable and self.process.poll() is None

    async def call(self, name: str, data: bytes) -> bytes:
        with self._reaching():
            return bytes(await self._calls[name](data))

    async def decode(self, handle: int, max_tok: int, reader: Reader) -> None:
        """A Decode RPC, to its end."""
        with self._reaching():
            async for response in self._decode(jetstream_shim.wire().request(handle, max_tok)):
                reader.add_all(rows_of(response))

    async def disconnect(self) -> None:
        """After it ended: what is under way fails by itself."""
        await self._channel.close(_GRACE_S)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Nobody cancels our RPCs (a request is cancelled by a call): one that fails lost it."""
        codes, failed = jetstream_shim.wire().grpc.StatusCode, jetstream_shim.wire().grpc.aio
        try:
            yield
        except failed.AioRpcError as error:
            if error.code() is codes.UNAVAILABLE and not self._stopping:
                self._unreachable = True
                self.process.kill()
            why = f"{error.code().name}: {error.details()}"
            raise EngineRestarted(f"the JetStream process went away: {why}") from error
        except asyncio.CancelledError as error:
            raise EngineRestarted("the driver was closed") from error

    def stop(self, timeout_s: float) -> None:
        """Lets it end by itself, then kills it."""
        assert self.process.stdin is not None
        self._stopping = True
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

"""One child process of this process, watched by the event loop: no thread, no polling.

Started with vfork (`subprocess.Popen` without hooks), because fork() of a trainer copies page
tables for milliseconds; watched through a pidfd, because threads per wait do not scale to
hundreds of episodes. Works on asyncio's loop and on uvloop. Not here: what to run, or how to kill
more than this one process.
Invariant: after `wait` returns or raises, the process is reaped and no descriptor is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult

KILLED = 128 + signal.SIGKILL
DRAIN_S = 1.0  # how long output may trickle in after the process has ended


class Tail:
    """The last `limit` bytes read from a pipe."""

    def __init__(self, fd: int, limit: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.limit = limit
        self.data = bytearray()
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        self.data += chunk
        if len(self.data) > 2 * self.limit:
            del self.data[: -self.limit]

    def close(self) -> None:
        if not self.ended.is_set():
            asyncio.get_running_loop().remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()

    def bytes(self) -> bytes:
        return bytes(self.data[-self.limit :]) if self.limit else b""


class Child:
    """A started program. `wait` must be awaited exactly once."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | Path,
        output_limit_bytes: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._started_s = time.monotonic()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=err_write,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as error:
            os.close(out_read)
            os.close(err_read)
            raise SandboxError(f"could not start {argv[0]!r} in {cwd}: {error}") from error
        finally:
            os.close(out_write)
            os.close(err_write)
        self.pid = self._popen.pid
        self._out = Tail(out_read, output_limit_bytes)
        self._err = Tail(err_read, output_limit_bytes)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        if self._popen.poll() is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._exited.set()

    def kill(self) -> None:
        """Kills this one process. It is not reaped yet, so its id cannot be another's."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(
        self, timeout_s: float, stops: Sequence[asyncio.Event], kill: Callable[[], None]
    ) -> ExecResult:
        """Waits for the end; calls `kill` (which must bring it) on timeout or any of `stops`."""
        ended = False
        try:
            ended = await self._ends_within(timeout_s, stops)
        finally:
            if not self._exited.is_set():
                kill()
                await uncancelled(self._exited.wait())
            await uncancelled(self._drain())
        code = self._popen.returncode
        return ExecResult(
            returncode=(code if code >= 0 else 128 - code) if ended else KILLED,
            stdout=self._out.bytes(),
            stderr=self._err.bytes(),
            timed_out=not ended and not any(stop.is_set() for stop in stops),
            seconds=time.monotonic() - self._started_s,
        )

    async def _ends_within(self, timeout_s: float, stops: Sequence[asyncio.Event]) -> bool:
        events = [asyncio.ensure_future(event.wait()) for event in (self._exited, *stops)]
        try:
            await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        return self._exited.is_set()

    async def _drain(self) -> None:
        """Reads what is left in the pipes, and no longer than DRAIN_S."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._out.ended.wait()
                await self._err.ended.wait()
        except TimeoutError:
            pass
        finally:
            self._out.close()
            self._err.close()


async def uncancelled(work: Coroutine[Any, Any, object]) -> None:
    """Finishes `work` even when the waiting task is cancelled meanwhile; then is cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled

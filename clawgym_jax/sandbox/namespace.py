"""Pid 1 of a bubblewrap run, held by a pidfd, so that the whole run can be killed at once.

bwrap (with `--as-pid-1`) tells its child's process id on a pipe (`--info-fd`); that child is pid 1
of a pid namespace. Its death kills every process in the namespace, and bwrap, which waits for it,
ends only after the last of them is gone. Not here: how bwrap is started.
Invariant: the killed process is bwrap's child and no other: the pidfd is opened while bwrap lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from types import TracebackType

from clawgym_jax.sandbox.child import Child


class NamespaceInit:
    """Use as a context; pass `writer` to bwrap, then `watch` the started bwrap."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._text = b""
        self._pidfd: int | None = None
        self._child: Child | None = None

    def __enter__(self) -> NamespaceInit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_writer()
        self._close_reader()
        if self._pidfd is not None:
            os.close(self._pidfd)

    def watch(self, child: Child) -> None:
        """Learns pid 1 of the namespace as soon as bwrap knows it."""
        self._close_writer()
        self._child = child
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def kill(self) -> None:
        """Kills every process of the namespace, or bwrap itself when it has not got so far."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self._child is not None:
            self._child.kill()

    def _read(self) -> None:
        try:
            chunk = os.read(self._reader, 4096)
        except BlockingIOError:
            return
        self._text += chunk
        try:
            pid = int(json.loads(self._text)["child-pid"])
        except (ValueError, KeyError):
            if not chunk:
                self._close_reader()
            return
        self._close_reader()
        with contextlib.suppress(ProcessLookupError):  # it has come and gone
            self._pidfd = os.pidfd_open(pid)

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _close_reader(self) -> None:
        if self._reader >= 0:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

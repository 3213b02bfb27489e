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
import time
from pathlib import Path
from types import TracebackType

from clawgym_jax.sandbox.child import Child

STOP_CHECKS, STOP_CHECK_S = 100, 0.0005  # how long bwrap gets to stop before it is killed


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
            kill_with_children(self._child)

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


def kill_with_children(child: Child) -> None:
    """Kills a bwrap that has not told its namespace's pid 1 yet, and that process, if there is one.

    Between its clone() and its go-ahead, bwrap's child waits for a word that a killed bwrap never
    says, and would wait for ever: so bwrap is stopped first, and its children are counted.
    """
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(child.pid, signal.SIGSTOP)
        for _ in range(STOP_CHECKS):
            if _state(child.pid) in "TtZX":
                break
            time.sleep(STOP_CHECK_S)
        listed = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="ascii")
        for pid in listed.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    child.kill()


def _state(pid: int) -> str:
    """R, S, T, Z, ...: the letter behind the program's name in /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]

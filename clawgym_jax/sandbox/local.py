"""What the kinds without a daemon share: folders on the host, one child process per run, close.

A kind subclasses `LocalSandbox` and says how a program is started and how everything it started
is killed. Not here: those two.
Invariant: `close` returns only after every run has ended and the folders are gone; after it,
`run` is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, SandboxSpec
from clawgym_jax.sandbox.folders import Folder, RunFolder

OUTPUT_LIMIT_BYTES = 1 << 20
PROGRAMS = Path(__file__).with_name("programs")


def socket_in(folder: Path) -> Path:
    """The one unix socket in the proxy's private folder."""
    found = [path for path in folder.iterdir() if path.is_socket()] if folder.is_dir() else []
    if len(found) != 1:
        raise SandboxError(
            f"expected one unix socket in {folder}, got {len(found)}: start the proxy first"
        )
    return found[0]


class LocalSandbox:
    """One sandbox in two host folders. Paths inside are set by the kind."""

    def __init__(
        self,
        spec: SandboxSpec,
        folders: RunFolder,
        folder: Folder,
        *,
        workspace: str,
        home: str,
        base_url: str,
        output_limit_bytes: int,
    ) -> None:
        self.workspace = workspace
        self.home = home
        self.workspace_host = folder.work
        self.home_host = folder.home
        self.base_url = base_url
        self.spec = spec
        self.output_limit_bytes = output_limit_bytes
        self._folders = folders
        self._folder = folder
        self._closing = asyncio.Event()
        self._removed = False
        self._lock = asyncio.Lock()
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str | None = None,
        stop: asyncio.Event | None = None,
    ) -> ExecResult:
        if self._closing.is_set():
            raise SandboxError(f"the sandbox of {self.spec.episode_id} is closed: make another")
        stops = [self._closing] if stop is None else [self._closing, stop]
        self._live += 1
        self._idle.clear()
        try:
            return await self.start(list(argv), env, timeout_s, cwd or self.workspace, stops)
        finally:
            self._live -= 1
            if self._live == 0:
                self._idle.set()

    async def start(
        self,
        argv: list[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str,
        stops: Sequence[asyncio.Event],
    ) -> ExecResult:
        """Runs `argv` to its end, the timeout or one of `stops`, and leaves no process."""
        raise NotImplementedError

    async def close(self) -> None:
        self._closing.set()
        async with self._lock:
            await self._idle.wait()
            if not self._removed:
                await self._folders.remove(self._folder)
                self._removed = True

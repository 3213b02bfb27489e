"""At most so many sandboxes at a time, whatever their kind.

Not a pool of ready sandboxes: one costs a millisecond (bubblewrap, process), and a used one is
never given to another episode.
Invariant: a slot is taken by `create` and given back by the first `close`, or when `create` fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from clawgym_jax.core.interfaces import ExecResult, Sandbox, SandboxFactory, SandboxSpec


class BoundedSandbox:
    """A sandbox that gives its slot back when it is closed."""

    def __init__(self, inner: Sandbox, slots: asyncio.Semaphore) -> None:
        self.workspace = inner.workspace
        self.home = inner.home
        self.workspace_host = inner.workspace_host
        self.home_host = inner.home_host
        self.base_url = inner.base_url
        self._inner = inner
        self._slots = slots
        self._held = True

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str | None = None,
        stop: asyncio.Event | None = None,
    ) -> ExecResult:
        return await self._inner.run(argv, env, timeout_s, cwd, stop)

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            if self._held:
                self._held = False
                self._slots.release()


class BoundedSandboxes:
    """A factory with a limit; `create` waits for a slot."""

    def __init__(self, inner: SandboxFactory, max_live: int) -> None:
        self.kind = inner.kind
        self._inner = inner
        self._slots = asyncio.Semaphore(max_live)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await self._slots.acquire()
        try:
            return BoundedSandbox(await self._inner.create(spec), self._slots)
        except BaseException:
            self._slots.release()
            raise

    def sweep(self) -> int:
        return self._inner.sweep()

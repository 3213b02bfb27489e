"""Sandboxes that are plain processes: a folder, a clean environment, and nobody left behind.

For trusted programs and for machines where bubblewrap does not work. No isolation: programs see
the host's files, processes and network; paths and hostname are the host's, so prompts that show
them differ between episodes; pids and cpus of the spec are not enforced.
Invariant: when `run` returns, no process it started is alive, daemonised ones included; when this
process dies, however it dies, the reaper of each run kills the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, SandboxSpec
from clawgym_jax.sandbox.child import Child
from clawgym_jax.sandbox.folders import RunFolder
from clawgym_jax.sandbox.limits import exact_env, limited
from clawgym_jax.sandbox.local import OUTPUT_LIMIT_BYTES, PROGRAMS, LocalSandbox


class ProcessSandbox(LocalSandbox):
    """Every run has a reaper process above it, told to kill by closing its control pipe."""

    async def start(
        self,
        argv: list[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str,
        stops: Sequence[asyncio.Event],
    ) -> ExecResult:
        command = limited(exact_env(argv, env), self.spec, processes=False)
        with contextlib.ExitStack() as control:
            reader, writer = os.pipe()
            control.callback(os.close, writer)
            reaper = [sys.executable, "-I", "-S", str(PROGRAMS / "reap.py"), str(reader)]
            try:
                child = Child(
                    [*reaper, *command], env, cwd, self.output_limit_bytes, pass_fds=[reader]
                )
            finally:
                os.close(reader)
            return await child.wait(timeout_s, stops, kill=control.close)


class ProcessSandboxes:
    """Makes plain-process sandboxes. Programs reach the proxy on its own loopback port."""

    kind = "process"

    def __init__(
        self, base: Path | None = None, output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    ) -> None:
        self._folders = RunFolder(base)
        self._output_limit_bytes = output_limit_bytes

    async def create(self, spec: SandboxSpec) -> ProcessSandbox:
        if spec.endpoint_socket is not None and spec.network_port is None:
            raise SandboxError(
                "a process sandbox reaches the proxy over loopback TCP: give network_port, "
                f"got only the socket folder {spec.endpoint_socket}"
            )
        folder = self._folders.create()
        return ProcessSandbox(
            spec,
            self._folders,
            folder,
            workspace=str(folder.work),
            home=str(folder.home),
            base_url=f"http://127.0.0.1:{spec.network_port}" if spec.network_port else "",
            output_limit_bytes=self._output_limit_bytes,
        )

    def sweep(self) -> int:
        return self._folders.sweep()

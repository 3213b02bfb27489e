"""A bubblewrap run that is ended while bwrap is still starting leaves no process behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from clawgym_jax.core.interfaces import SandboxSpec
from clawgym_jax.sandbox import bubblewrap
from clawgym_jax.sandbox.bubblewrap import BubblewrapSandboxes
from tests.conftest import require

RUNS = 60


def processes_naming(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # it has gone
            if text.encode() in command:
                found.append(int(folder.name))
    return found


def test_runs_ended_at_any_moment_of_their_start_leave_nothing(tmp_path: Path) -> None:
    require(not bubblewrap.why_not(), f"bubblewrap does not work: {bubblewrap.why_not()}")

    async def play() -> None:
        sandbox = await BubblewrapSandboxes(tmp_path).create(SandboxSpec("r", "e"))
        argv, env = ["sleep", "60"], {"PATH": "/usr/bin:/bin"}
        for number in range(RUNS):
            result = await sandbox.run(argv, env, timeout_s=0.0003 * number)
            assert result.timed_out
        for number in range(RUNS):
            task = asyncio.ensure_future(sandbox.run(argv, env, timeout_s=60))
            await asyncio.sleep(0.0003 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await sandbox.close()

    asyncio.run(play())
    assert processes_naming(str(tmp_path)) == []

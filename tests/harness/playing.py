"""Runs a real harness program against the real proxy, without a sandbox around it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.interfaces import Harness, McpServer, Sampler
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import SamplingParams
from clawgym_jax.proxy import ChatCodec, EpisodeSpec, EpisodeTrace, ProxyServer
from tests.proxy.support import FAST, tiny_codec


@dataclass(frozen=True)
class Played:
    returncode: int
    stdout: str
    stderr: str
    files: Mapping[str, bytes]  # of the workspace, afterwards
    trace: EpisodeTrace


@contextlib.asynccontextmanager
async def table(codec: ChatCodec | None = None) -> AsyncIterator[ProxyServer]:
    with tempfile.TemporaryDirectory() as folder, RecordLog(Path(folder) / "calls.log") as log:
        proxy = ProxyServer(codec or tiny_codec(), log, "run", FAST)
        await proxy.start()
        try:
            yield proxy
        finally:
            await proxy.stop()


async def play(
    proxy: ProxyServer,
    harness: Harness,
    sampler: Sampler,
    instruction: str,
    inputs: Mapping[str, bytes],
    episode_id: str = "ep",
    window_tok: int = 4096,
    servers: Sequence[McpServer] = (),
) -> Played:
    spec = EpisodeSpec(episode_id, harness, sampler, SamplingParams(), window_tok, 200, 7)
    endpoint = proxy.open_episode(spec)
    with tempfile.TemporaryDirectory() as folder:
        home, workspace = Path(folder) / "home", Path(folder) / "workspace"
        (workspace / "out").mkdir(parents=True)
        _write(workspace, inputs)
        plan = harness.launch(endpoint, instruction, str(workspace), str(home), servers)
        _write(home, plan.files)
        process = await asyncio.create_subprocess_exec(
            *plan.argv,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **plan.env},
            cwd=workspace,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        trace = await proxy.close_episode(episode_id)
        files = {
            str(path.relative_to(workspace)): path.read_bytes()
            for path in workspace.rglob("*")
            if path.is_file()
        }
    assert process.returncode is not None
    return Played(process.returncode, out.decode(), err.decode(), files, trace)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

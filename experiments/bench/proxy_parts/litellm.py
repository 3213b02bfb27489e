"""LiteLLM's proxy in front of the null backend, in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

PACKAGE = "litellm[proxy]==1.108.7"
KEY = "sk-bench"
HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[2] / ".cache" / "litellm"
START_S = 120


def environment(named: str | None, install: bool) -> Path | None:
    """The interpreter that has LiteLLM; None where there is none and none may be installed."""
    if named:
        return Path(named)
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists() and install:
        print(f"installing {PACKAGE} into {ENVIRONMENT} (about a minute)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    return python if python.exists() else None


@contextlib.asynccontextmanager
async def servers(python: Path) -> AsyncIterator[tuple[int, int]]:
    """(LiteLLM's port, the backend's port)."""
    async with contextlib.AsyncExitStack() as stack:
        backend = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "null_backend.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        stack.push_async_callback(_end, backend)
        assert backend.stdout
        backend_port = json.loads(await backend.stdout.readline())["port"]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = _free_port()
        proxy = await asyncio.create_subprocess_exec(
            str(python.with_name("litellm")),
            *("--config", str(_config(folder, backend_port)), "--port", str(port)),
            *("--host", "127.0.0.1", "--num_workers", "1", "--telemetry", "False"),
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=(folder / "log").open("wb"),
            stderr=asyncio.subprocess.STDOUT,
        )
        stack.push_async_callback(_end, proxy)
        if not await _answers(port, proxy):
            raise RuntimeError(f"LiteLLM did not start: {(folder / 'log').read_bytes()[-2000:]!r}")
        yield port, backend_port


def _config(folder: Path, backend_port: int) -> Path:
    params = {
        "model": "openai/m",
        "api_base": f"http://127.0.0.1:{backend_port}/v1",
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": "m", "litellm_params": params}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False, "drop_params": True},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


async def _answers(port: int, process: asyncio.subprocess.Process) -> bool:
    for _ in range(START_S * 5):
        if process.returncode is not None:
            break
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
            continue
        writer.close()
        return True
    return False


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port

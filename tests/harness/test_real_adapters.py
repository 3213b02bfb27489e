"""Starts the real pi and Claude Code in their images, with no network, against the real proxy.

The model's words are scripted: one shell command by tool, then a closing line. What the programs
send is looked at, never stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, Harness, SandboxSpec
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Delivery, Role, SamplingParams
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.pi import Pi
from clawgym_jax.proxy import EpisodeSpec, EpisodeTrace, ProxyServer
from tests.conftest import require
from tests.proxy.support import FAST, ScriptedEngine, call_text, tiny_codec

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(240)]

HARNESSES = [
    pytest.param(Pi(), "bash", id="pi"),
    pytest.param(ClaudeCode(), "Bash", id="claude_code"),
]
WINDOW_TOK = 200_000


@dataclass(frozen=True)
class Played:
    result: ExecResult
    trace: EpisodeTrace
    engine: ScriptedEngine
    files: dict[str, str]


@contextlib.asynccontextmanager
async def proxy_at(folder: Path) -> AsyncIterator[ProxyServer]:
    with RecordLog(folder / "calls.log") as log:
        proxy = ProxyServer(tiny_codec(), log, "run", FAST)
        await proxy.start(socket_dir=folder / "s")
        try:
            yield proxy
        finally:
            await proxy.stop()


async def play(harness: Harness, script: list[str], base: Path, wrong_url: bool = False) -> Played:
    """One episode in a container of the harness's image."""
    from clawgym_jax.sandbox.docker import DockerSandboxes

    engine = ScriptedEngine(tiny_codec(), list(script))
    with tempfile.TemporaryDirectory(prefix="cgj") as short:
        async with proxy_at(Path(short)) as proxy:
            factory = DockerSandboxes(base)
            image = harness.image
            spec = SandboxSpec("tests", "real", image=image, endpoint_socket=Path(short) / "s")
            sandbox = await factory.create(spec)
            try:
                episode = EpisodeSpec(
                    "real", harness, engine, SamplingParams(), WINDOW_TOK, 4096, 7
                )
                endpoint = proxy.open_episode(episode)
                url = endpoint.base_url.replace(proxy.origin, sandbox.base_url)
                if wrong_url:
                    url = "http://127.0.0.1:9"
                inside = type(endpoint)(
                    url, endpoint.key, endpoint.model, endpoint.window_tok, endpoint.max_tok
                )
                plan = harness.launch(inside, "Write hello to out.txt.", "/workspace", sandbox.home)
                for name, content in plan.files.items():
                    path = sandbox.home_host / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                result = await sandbox.run(plan.argv, plan.env, 120)
                trace = await proxy.close_episode("real")
                files = {p.name: p.read_text() for p in sandbox.workspace_host.glob("*.txt")}
            finally:
                await sandbox.close()
                factory.client.close()
    return Played(result, trace, engine, files)


@pytest.fixture
def images() -> None:
    from clawgym_jax.sandbox import docker, recipes

    try:
        client = docker.connect()
    except SandboxError as error:
        require(False, str(error))
    with contextlib.closing(client):
        for name in ("pi", "claude-code"):
            built = bool(client.images.list(name=recipes.tag(name)))
            require(built, f"image {name} is not built: python launch/images.py --images={name}")


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(("harness", "tool"), HARNESSES)
def test_a_real_harness_works_through_the_proxy(
    harness: Harness, tool: str, tmp_path: Path
) -> None:
    command = {"command": "printf hello > out.txt && pwd && hostname && id -un"}
    if tool == "Bash":
        command["description"] = "Write the file"
    script = [call_text(tool, command), "The file is written."]
    played = asyncio.run(play(harness, script, tmp_path))

    assert played.result.returncode == 0, played.result.stderr.decode()
    assert b"The file is written." in played.result.stdout
    assert played.files["out.txt"] == "hello"
    assert not played.trace.failure
    calls = played.trace.calls
    assert [call.protocol for call in calls] == [harness.protocol] * 2
    assert [call.role for call in calls] == [Role.MAIN] * 2
    assert {call.chain for call in calls} == {"main"}
    assert all(call.delivery is Delivery.DELIVERED for call in calls)
    # The second prompt holds the first answer, id for id, and the command's output after it.
    first, second = calls
    assert [span.call_id for span in second.spans] == [first.call_id]
    prompt = tiny_codec().decode(second.prompt_ids)
    assert "/workspace\nsandbox\nagent" in prompt
    assert list(second.prompt_ids[: first.prompt_tok]) == list(first.prompt_ids)


@pytest.mark.usefixtures("images")
def test_claude_codes_sub_agent_has_a_chain_of_its_own(tmp_path: Path) -> None:
    ask = {"description": "Greet", "prompt": "Say hi.", "subagent_type": "general-purpose"}
    script = [call_text("Agent", ask), "Hi from below.", "All done."]
    played = asyncio.run(play(ClaudeCode(parallel_agents=False), script, tmp_path))
    assert played.result.returncode == 0 and b"All done." in played.result.stdout
    first, below, last = played.trace.calls
    assert (first.chain, last.chain) == ("main", "main") and below.chain not in ("", "main")
    assert [c.role for c in (first, below, last)] == [Role.MAIN, Role.SUBAGENT, Role.MAIN]
    assert [span.call_id for span in last.spans] == [first.call_id]
    assert "Hi from below." in tiny_codec().decode(last.prompt_ids[first.prompt_tok :])


@pytest.mark.usefixtures("images")
def test_a_harness_that_never_called_us_is_seen(tmp_path: Path) -> None:
    """A16: another base URL; nobody is there, and no call is recorded."""
    played = asyncio.run(play(ClaudeCode(max_retries=0), ["unused"], tmp_path, wrong_url=True))
    assert played.result.returncode != 0
    assert played.trace.calls == () and played.trace.failure == "0 calls captured"
    assert json.loads(played.result.stdout)["is_error"]

"""A task's MCP servers: placed, started inside the sandbox, seen and used through every harness."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clawgym_jax.harness.mcp
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Harness, McpServer, SandboxFactory
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Episode, Outcome, SamplingParams
from clawgym_jax.harness.agent_loop import AgentLoop
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.codex import Codex
from clawgym_jax.harness.mcp import corpus_server, place
from clawgym_jax.harness.openclaw import OpenClaw
from clawgym_jax.harness.opencode import OpenCode
from clawgym_jax.harness.pi import Pi
from clawgym_jax.harness.qwen_code import QwenCode
from clawgym_jax.proxy import ProxyServer
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.rollout.episode import Instance, Limits, Site, run_episode
from clawgym_jax.sandbox import bubblewrap
from clawgym_jax.sandbox.process import ProcessSandboxes
from clawgym_jax.tasks.task import FolderTask
from tests.conftest import require
from tests.harness.stagehand import PATIENT, WINDOW_TOK, Part, Stagehand, require_image
from tests.proxy.qwen3 import qwen3_codec
from tests.proxy.support import call_text

FACT = "The Elbe flows into the North Sea near Cuxhaven."
TASK = FolderTask(
    "mcp_0001",
    "Where does the Elbe end?",
    mount="/workspace",
    inputs={"corpus/rivers.md": f"# Rivers\n\n{FACT}\n".encode(), "corpus/seas.txt": b"Salt.\n"},
    servers=(corpus_server("library", "{workspace}/corpus"),),
)

# ---- placing --------------------------------------------------------------------------------


def test_paths_are_filled_in_and_files_placed() -> None:
    server = McpServer(
        "notes",
        ("node", "{home}/a/x.js", "--root={workspace}", "{other}"),
        {"WHERE": "{workspace}/n"},
        {"a/x.js": b"1", "./a/y.js": b"2"},
    )
    placed = place([server, corpus_server("library", "{home}/texts")], "/workspace", "/home/agent")
    settings = placed.as_settings()
    assert settings["notes"] == {
        "command": "node",
        "args": ["/home/agent/a/x.js", "--root=/workspace", "{other}"],
        "env": {"WHERE": "/workspace/n"},
    }
    assert settings["library"]["args"][-1] == "/home/agent/texts"
    assert {"a/x.js", "a/y.js", ".mcp_library/corpus.py"} <= set(placed.files)


@pytest.mark.parametrize("name", ["", "a-b", "a b", "a__b", "_a", "a_", "ä", "x" * 33])
def test_names_that_make_no_tool_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name"):
        place([McpServer(name, ("true",))], "/w", "/h")


def test_what_cannot_work_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="two are called 'a'"):
        place([McpServer("a", ("true",)), McpServer("a", ("true",))], "/w", "/h")
    with pytest.raises(ConfigError, match="expected a command"):
        place([McpServer("a", ())], "/w", "/h")
    for path in ("/etc/passwd", "../x", "a/../../x", "."):
        with pytest.raises(ConfigError, match="relative to HOME"):
            place([McpServer("a", ("true",), files={path: b""})], "/w", "/h")
    same = [McpServer(name, ("true",), files={"x.py": b"1"}) for name in ("a", "b")]
    assert place(same, "/w", "/h").files == {"x.py": b"1"}
    with pytest.raises(ConfigError, match=r"b brings another x\.py"):
        place([same[0], McpServer("b", ("true",), files={"x.py": b"2"})], "/w", "/h")


# ---- the server over a corpus ---------------------------------------------------------------


def serve(folder: Path, *lines: Any) -> list[dict[str, Any]]:
    """What the corpus server answers to lines of input, each a message or a text."""
    placed = place([corpus_server("library", "{workspace}")], str(folder), str(folder / "home"))
    for name, content in placed.files.items():
        path = folder / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    done = subprocess.run(
        [*placed.servers["library"].argv], input=text, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def ask(request_id: object, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def test_a_session_with_the_corpus_server(tmp_path: Path) -> None:
    (tmp_path / "rivers.md").write_text(FACT)
    (tmp_path / "long.txt").write_text("A line about lakes.\n" * 500)
    hello, tools, found, page, none, wrong = serve(
        tmp_path,
        ask(1, "initialize", protocolVersion="2025-03-26", capabilities={}),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        ask("two", "tools/list"),
        ask(3, "tools/call", name="search", arguments={"query": "elbe sea"}),
        ask(4, "tools/call", name="fetch", arguments={"name": "long.txt", "offset": 20}),
        ask(5, "tools/call", name="fetch", arguments={"name": "../x"}),
        ask(6, "tools/call", name="search", arguments={"query": 7}),
    )
    assert hello["result"]["protocolVersion"] == "2025-03-26"
    assert "tools" in hello["result"]["capabilities"]
    assert tools["id"] == "two"
    assert [tool["name"] for tool in tools["result"]["tools"]] == ["search", "fetch"]
    assert found["result"]["content"][0]["text"] == f"1. rivers.md (offset 0)\n{FACT}"
    assert page["result"]["content"][0]["text"].endswith("go on with offset=6020]")
    assert [r["result"]["isError"] for r in (found, page, none, wrong)] == [0, 0, 1, 1]


def test_bad_messages_get_the_errors_of_json_rpc(tmp_path: Path) -> None:
    answers = serve(
        tmp_path,
        "{ no json",
        "",
        [ask(1, "ping")],
        ask(2, "resources/list"),
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": [1]},
        ask(4, "tools/call", name="fly"),
        {"jsonrpc": "2.0", "id": 5, "result": {}},  # an answer that nobody asked for
        ask(6, "ping"),
    )
    codes = [(answer["id"], answer.get("error", {}).get("code")) for answer in answers]
    assert codes == [
        (None, -32700),
        (None, -32600),
        (2, -32601),
        (3, -32602),
        (4, -32602),
        (6, None),
    ]


@functools.cache
def corpus_module() -> Any:
    """programs/corpus.py, which is in no package."""
    path = Path(clawgym_jax.harness.mcp.__file__).parent / "programs" / "corpus.py"
    spec = importlib.util.spec_from_file_location("corpus", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXTS = st.text(st.sampled_from("ab \n\r\u2028é"), max_size=9000)


@settings(max_examples=40, deadline=None)
@given(TEXTS)
def test_passages_and_pages_are_the_whole_text(text: str) -> None:
    found = list(corpus_module().passages(text))
    assert all(text[start:end] == piece for start, end, piece in found)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    covered = "".join(piece for _, _, piece in found)
    assert text.startswith(covered) and not text[len(covered) :].strip()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.txt").write_bytes(text.encode())
        corpus = corpus_module().Corpus(folder)
        pages, offset = "", 0
        while offset is not None:
            page = corpus.fetch("a.txt", offset)
            more = re.search(r"\n\[characters \d+-\d+ of \d+; go on with offset=(\d+)\]\Z", page)
            pages += page[: more.start()] if more else page
            offset = int(more[1]) if more else None
        assert pages == text.replace("\r\n", "\n").replace("\r", "\n")


def test_the_best_passage_comes_first(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"Lake number {i}. The lake is deep.\n")
    (tmp_path / "17.txt").write_text("padding " * 400 + "\nThe otter swims in the lake.\n")
    (tmp_path / "link.txt").symlink_to("/etc/hostname")
    corpus = corpus_module().Corpus(str(tmp_path))
    assert "link.txt" not in list(corpus.names())
    found = corpus.search("otter in a lake", 3)
    assert found.startswith("1. 17.txt (offset 3201)\nThe otter swims")
    assert len(re.findall(r"^\d+\. ", found, re.MULTILINE)) == 3
    assert corpus.search("OTTER", 9).count("offset") == 1


# ---- through the harnesses ------------------------------------------------------------------


QUERY = {"query": "where does the Elbe flow", "limit": 1}


def library_search(prompt: str) -> str:
    """Calls the task's tool under whatever name the harness offers it."""
    if '"name": "tool_describe"' in prompt:  # OpenClaw: tools are called through a tool
        return call_text("tool_call", {"id": "library__search", "args": QUERY})
    tools = prompt.partition("\n<tools>\n")[2].partition("\n</tools>")[0]
    names = re.findall(r'"name": "(\w*library\w*search)"', tools)
    assert len(names) == 1, f"expected the task's tool among the tools, found {names}"
    return call_text(names[0], QUERY)


async def episode(
    harness: Harness, sandboxes: SandboxFactory, folder: Path, stagehand: Stagehand
) -> Episode:
    with (
        tempfile.TemporaryDirectory(prefix="cgj") as short,
        RecordLog(folder / "calls.log") as log,
    ):
        proxy = ProxyServer(qwen3_codec(), log, "run", PATIENT)
        await proxy.start(socket_dir=Path(short) / "s")
        try:
            limits = Limits(episode_s=150, window_tok=WINDOW_TOK)
            site = Site("tests", proxy, Path(short) / "s", sandboxes, limits)
            instance = Instance("ep", "group", TASK, harness, "train", 0, 7)
            return await run_episode(instance, site, stagehand, SamplingParams(), True)
        finally:
            await proxy.stop()


def play(
    harness: Harness, make_sandboxes: Callable[[Path], SandboxFactory], folder: Path
) -> tuple[Episode, Stagehand]:
    parts = [
        Part("Generate a title for this conversation", ["A river"]),
        Part("Where does the Elbe end?", [library_search, "In the North Sea."]),
    ]
    stagehand = Stagehand(parts)
    sandboxes = make_sandboxes(folder)
    return asyncio.run(episode(harness, sandboxes, folder, stagehand)), stagehand


def assert_used(found: Episode, stagehand: Stagehand) -> None:
    assert found.record.outcome is Outcome.OK, found.record.detail
    first, last = [call for call in found.calls if call.chain == "main"]
    assert extends(last.prompt_ids, first) and not last.breaks
    said = qwen3_codec().decode(last.prompt_ids[first.prompt_tok + first.completion_tok :])
    assert FACT in said, said  # what the server found, told to the model


@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
def test_the_agent_loop_uses_a_tasks_server(kind: str, tmp_path: Path) -> None:
    if kind == "bubblewrap":
        require(not bubblewrap.why_not(), bubblewrap.why_not())
    make = {"process": ProcessSandboxes, "bubblewrap": bubblewrap.BubblewrapSandboxes}[kind]
    found, stagehand = play(AgentLoop(), make, tmp_path)
    assert_used(found, stagehand)


def test_a_harness_without_mcp_is_not_paired_with_such_a_task(tmp_path: Path) -> None:
    found, _ = play(Pi(), ProcessSandboxes, tmp_path)
    assert found.record.outcome is Outcome.INFRASTRUCTURE
    assert "speaks no MCP" in found.record.detail


@pytest.mark.docker
@pytest.mark.real_harness
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "harness",
    [
        pytest.param(AgentLoop(), id="agent_loop"),
        pytest.param(ClaudeCode(), id="claude_code"),
        pytest.param(Codex(), id="codex"),
        pytest.param(OpenClaw(), id="openclaw"),
        pytest.param(QwenCode(), id="qwen_code", marks=pytest.mark.slow),
        pytest.param(OpenCode(), id="opencode", marks=pytest.mark.slow),
    ],
)
def test_a_harness_uses_a_tasks_server(harness: Harness, tmp_path: Path) -> None:
    from clawgym_jax.sandbox.docker import DockerSandboxes

    require_image(harness.image or "base")
    found, stagehand = play(harness, DockerSandboxes, tmp_path)
    assert_used(found, stagehand)

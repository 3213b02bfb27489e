"""The two tiny harness programs, run for real against the real proxy."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from clawgym_jax.core.errors import EngineRestarted
from clawgym_jax.core.interfaces import Harness
from clawgym_jax.core.types import Role
from clawgym_jax.harness.tiny_chat import TinyChat
from clawgym_jax.harness.tiny_shell import TinyShell
from clawgym_jax.proxy.breaks import extends
from tests.harness.playing import Played, play, table
from tests.proxy.support import ScriptedEngine, call_text, tiny_codec

TASK = "Copy the file in/ketu to the note liso."
INPUTS = {"in/ketu.csv": b"banor=disa\n"}


def run(harness: Harness, *script: Any, **options: Any) -> tuple[Played, ScriptedEngine]:
    engine = ScriptedEngine(tiny_codec(), list(script))

    async def go() -> Played:
        async with table() as proxy:
            return await play(proxy, harness, engine, TASK, INPUTS, **options)

    return asyncio.run(go()), engine


def bash(command: str) -> str:
    return call_text("bash", {"command": command})


def test_chat_plays_a_whole_task() -> None:
    played, engine = run(
        TinyChat(),
        call_text("list_files", {"path": "in"}),
        call_text("read_file", {"path": "in/ketu.csv"}),
        call_text("write_file", {"path": "out/liso.md", "content": "banor=disa"}),
        "done",
    )
    assert (played.returncode, played.stdout) == (0, "done\n"), played.stderr
    assert played.files["out/liso.md"] == b"banor=disa"
    assert all(extends(b.prompt_ids, a) for a, b in itertools.pairwise(played.trace.calls))
    assert not played.trace.causes
    shown = tiny_codec().decode(engine.asked[-1].prompt_ids)
    assert "<tool_response>\nketu.csv\n</tool_response>" in shown
    assert engine.asked[0].prompt_ids.size <= 250


def test_shell_plays_a_whole_task() -> None:
    played, engine = run(
        TinyShell(),
        "<think>\nlook\n</think>\n\n" + bash("ls in"),
        bash("cp in/ketu.csv out/liso.md"),
        "done",
    )
    assert (played.returncode, played.stdout) == (0, "done\n"), played.stderr
    assert played.files["out/liso.md"] == b"banor=disa\n"
    assert all(extends(b.prompt_ids, a) for a, b in itertools.pairwise(played.trace.calls))
    assert not played.trace.causes
    assert engine.asked[0].prompt_ids.size <= 250


@pytest.mark.parametrize("harness", [TinyChat(), TinyShell()], ids=lambda h: h.name)
def test_nothing_of_the_machine_is_in_a_prompt(harness: Harness) -> None:
    _, engine = run(harness, "done")
    shown = tiny_codec().decode(engine.asked[0].prompt_ids)
    assert "tmp" not in shown and "home" not in shown and "20" not in shown


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (call_text("read_file", {"path": "in/none"}), "error: No such file or directory"),
        (call_text("read_file", {"path": "../home/.tiny_chat/config.json"}), "error: outside"),
        (call_text("read_file", {"file": "in/ketu.csv"}), "error: expected path"),
        (call_text("read_file", {"path": 3}), "error: arguments must be text"),
        (call_text("rm", {"path": "in"}), "error: no tool rm"),
    ],
)
def test_chat_tool_errors_are_results(call: str, result: str) -> None:
    played, engine = run(TinyChat(), call, "done")
    assert played.returncode == 0, played.stderr
    assert result in tiny_codec().decode(engine.asked[1].prompt_ids)


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("cat in/none", "exit status 1"),
        ("true", "\nok\n"),
        ("echo a; sleep 60 & echo b", "a\nb\n</tool_response>"),
        ("sleep 60", "timed out after 0.5 s"),
        ("echo $TINY_SHELL_KEY.", "\n.\n</tool_response>"),
    ],
)
def test_shell_results(command: str, result: str) -> None:
    played, engine = run(TinyShell(command_timeout_s=0.5), bash(command), "done")
    assert played.returncode == 0, played.stderr
    assert result in tiny_codec().decode(engine.asked[1].prompt_ids)


@pytest.mark.parametrize("harness", [TinyChat(), TinyShell()], ids=lambda h: h.name)
def test_engine_restart_is_never_seen(harness: Harness) -> None:
    played, _ = run(harness, EngineRestarted("gone"), "done")
    assert played.returncode == 0, played.stderr
    assert played.trace.causes == {"hidden EngineRestarted": 1}
    assert len(played.trace.calls) == 1


@pytest.mark.parametrize("harness", [TinyChat(attempts=2), TinyShell(attempts=2)])
def test_api_error_is_a_failure(harness: Harness) -> None:
    played, _ = run(harness, RuntimeError("engine bug"))
    assert played.returncode == 1
    assert "api error" in played.stderr
    assert "engine bug" in played.trace.failure


@pytest.mark.parametrize(
    ("harness", "call"),
    [
        (TinyChat(max_turns=2), call_text("list_files", {"path": "in"})),
        (TinyShell(max_turns=2), bash("ls")),
    ],
)
def test_too_many_turns(harness: Harness, call: str) -> None:
    played, _ = run(harness, call, call, call)
    assert played.returncode == 2
    assert len(played.trace.calls) == 2


def test_overflow_ends_the_program_before_a_stream_starts() -> None:
    played, engine = run(TinyChat(), "done", window_tok=100)
    assert played.returncode == 1 and "context length" in played.stderr
    assert not engine.asked and played.trace.failure == "0 calls captured"


def test_shell_compacts_its_context() -> None:
    played, _ = run(
        TinyShell(compact_at_tok=100), bash("ls in"), "It holds ketu.csv.", "done", "more"
    )
    assert played.returncode == 0, played.stderr
    roles = [call.role for call in played.trace.calls]
    assert roles == [Role.MAIN, Role.COMPACTION, Role.MAIN]
    first, summary, last = played.trace.calls
    assert extends(summary.prompt_ids, first)  # the compaction call shares the whole prefix
    assert last.breaks == ("compaction",) and not last.spans
    assert "It holds ketu.csv." in tiny_codec().decode(last.prompt_ids)


def test_shell_asks_a_sub_agent() -> None:
    played, _ = run(
        TinyShell(agents=True),
        call_text("ask_agent", {"prompt": "What is in in/ketu.csv?"}),
        bash("cat in/ketu.csv"),
        "banor is disa",
        "done",
    )
    assert played.returncode == 0, played.stderr
    calls = played.trace.calls
    assert [call.role for call in calls] == [Role.MAIN, Role.SUBAGENT, Role.SUBAGENT, Role.MAIN]
    assert [call.chain for call in calls] == ["main", "agent1", "agent1", "main"]
    assert calls[1].breaks == ("sub-agent",)
    assert extends(calls[2].prompt_ids, calls[1]) and extends(calls[3].prompt_ids, calls[0])

"""Leads the real Codex through a freeform patch, sub-agents, a compaction and a task's server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.codex import Codex
from clawgym_jax.tree.filters import FilterConfig
from tests.harness.stagehand import (
    ALL_ROLES,
    Held,
    Part,
    assert_appends,
    assert_no_turn_lost,
    assert_sampled_once,
    at_once,
    call,
    perform,
    roles_of,
    shared_tok,
)
from tests.harness.word_server import WORDS
from tests.proxy.support import call_text

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(240)]

TASK = "Task ALPHA: correct the notes."
NOTES = {"in/notes.txt": "the notes\n"}
PATCH = """*** Begin Patch
*** Update File: in/notes.txt
@@
-the notes
+my notes
*** End Patch
"""


def run(command: str) -> str:
    return call("exec_command", cmd=command)


def wait(prompt: str) -> str:
    """Waits for the sub-agents that the prompt tells of."""
    found = dict.fromkeys(re.findall(r'"agent_id":"([^"]+)"', prompt))
    return call("multi_agent_v1__wait_agent", targets=[*found], timeout_ms=60_000)


def test_works_and_only_appends(tmp_path: Path) -> None:
    """`apply_patch` is a freeform tool on the wire: its patch is text there, not JSON."""
    lines = [
        "I look first.\n" + run("cat in/notes.txt"),
        at_once(run("sleep 1; printf hello > out.txt; echo slow"), run("echo fast")),
        call("apply_patch", input=PATCH),
        call_text("exec_command", '{"cmd": "ls'),
        "<think>\nNearly there.\n</think>\n\n" + run("cat in/notes.txt"),
        call("no_such_tool", path="in"),
        "All is done.",
    ]
    played = perform(
        Codex(), Part("ALPHA", [*lines]), instruction=TASK, base=tmp_path, inputs=NOTES
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {"in/notes.txt": "my notes\n", "out.txt": "hello"}, why
    assert_sampled_once(played)
    assert_appends(played.calls, why)
    assert_no_turn_lost(played)
    assert set(roles_of(played)) == {Role.MAIN} and len(played.calls) == len(lines), why
    assert played.select(FilterConfig()).leaves == 1
    assert played.trace.causes == {"malformed tool call": 1}
    prompts = played.stagehand.prompts
    assert '"name": "apply_patch"' in prompts[0]
    results = prompts[2].rpartition("<|im_start|>user")[2]
    assert 0 < results.index("slow") < results.index("fast")


def test_sub_agents_and_a_tasks_tool_are_declared_and_used(tmp_path: Path) -> None:
    def below(name: str) -> list[str]:
        return [run(f"echo {name} > {name}.txt; sleep 0.5"), run("ls"), f"Found {name}."]

    def spawn(message: str) -> str:
        return call("multi_agent_v1__spawn_agent", message=message)

    played = perform(
        Codex(),
        Part(
            "ALPHA",
            [
                call("mcp__words__reverse", word="olleh"),
                at_once(spawn("Task BETA: look."), spawn("Task GAMMA: look.")),
                Held(run("sleep 1")),
                wait,
                "All is done.",
            ],
        ),
        Part("BETA", [*below("b")]),
        Part("GAMMA", [*below("g")]),
        instruction=TASK,
        base=tmp_path,
        servers=[WORDS],
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {"b.txt": "b\n", "g.txt": "g\n"}, why
    assert_sampled_once(played)
    assert_no_turn_lost(played)
    assert "hello" in played.stagehand.prompts[1].rpartition("<tool_response>")[2]
    assert "Found b." in played.stagehand.prompts[-1] and "Found g." in played.stagehand.prompts[-1]
    chains = dict.fromkeys(each.chain for each in played.calls)
    assert [len(played.chain(name)) for name in chains] == [5, 3, 3], why
    for name in chains:
        assert_appends(played.chain(name), why)
        role = Role.MAIN if name == "main" else Role.SUBAGENT
        assert {each.role for each in played.chain(name)} == {role}, why
    assert played.select(ALL_ROLES).leaves == 3
    beta, gamma = (played.chain(name)[0] for name in chains if name != "main")
    assert shared_tok(beta, gamma) > 0.9 * beta.prompt_tok  # one root under both


def test_compacts_in_time_for_our_window(tmp_path: Path) -> None:
    """Its summary is asked for without tools: the prefix is another one, and that is named."""
    listing = "\n".join(f"line {number} of a long listing" for number in range(500))
    lines = [run(f"cat in/listing.txt; echo {number}") for number in range(2)]
    played = perform(
        Codex(),
        Part("CONTEXT CHECKPOINT COMPACTION", ["The numbers were read."], last_message=True),
        Part("ALPHA", [*lines, run("printf hello > out.txt"), "All is done."]),
        instruction=TASK,
        base=tmp_path,
        inputs={"in/listing.txt": listing},
        window_tok=28_000,
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files["out.txt"] == "hello", why
    assert_sampled_once(played)
    assert_no_turn_lost(played)
    assert "overflow" not in played.trace.causes, why
    assert roles_of(played).count(Role.COMPACTION) == 1, why
    at = roles_of(played).index(Role.COMPACTION)
    before, summary, after = played.calls[:at], played.calls[at], played.calls[at + 1 :]
    assert_appends(before, why)
    assert_appends(after, why)
    assert summary.chain == "main" and summary.breaks == ("compaction",), why
    assert summary.continues == tuple(each.call_id for each in before), why
    assert after[0].breaks == ("compaction",) and not after[0].spans, why
    assert "The numbers were read." in played.stagehand.prompts[at + 1]
    assert shared_tok(before[0], after[0]) > 5000  # system prompt and tools are shared again


def test_finds_a_tasks_tool_by_searching(tmp_path: Path) -> None:
    """As its own catalogue has it: the search is Codex's, and what it finds can be called."""
    played = perform(
        Codex(search_tools=True),
        Part(
            "ALPHA",
            [
                call("tool_search", query="reverse a word"),
                call("mcp__words__reverse", word="olleh"),
                "All is done.",
            ],
        ),
        instruction=TASK,
        base=tmp_path,
        servers=[WORDS],
    )
    why = played.explain()
    assert played.result.returncode == 0, why
    first, second, third = played.stagehand.prompts
    assert "mcp__words__reverse" not in first and "Reverse a word" in second, why
    assert "hello" in third.rpartition("<tool_response>")[2], why
    assert_sampled_once(played)
    assert_appends(played.calls, why)

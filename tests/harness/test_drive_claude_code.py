"""Leads the real Claude Code through its work, sub-agents and a compaction."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.tree.filters import DEAD_LEAF, FilterConfig
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


def bash(command: str) -> str:
    return call("Bash", command=command, description="Run it")


def ask(prompt: str) -> str:
    return call("Agent", description="Look", prompt=prompt, subagent_type="general-purpose")


def test_works_and_only_appends(tmp_path: Path) -> None:
    """Results of parallel calls arrive in the order of completion; the prompt has call order."""
    read = call("Read", file_path="/workspace/in/notes.txt")
    lines = [
        "I look first.\n" + read,
        at_once(bash("sleep 1; printf hello > out.txt; echo slow"), bash("echo fast")),
        call("Edit", file_path="/workspace/in/notes.txt", old_string="the", new_string="my"),
        call_text("Bash", '{"command": "ls'),
        "<think>\nNearly there.\n</think>\n\n" + bash("cat in/notes.txt"),
        "All is done.",
    ]
    played = perform(
        ClaudeCode(), Part("ALPHA", [*lines]), instruction=TASK, base=tmp_path, inputs=NOTES
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
    results = played.stagehand.prompts[2].rpartition("<|im_start|>user")[2]
    assert 0 < results.index("slow") < results.index("fast")
    assert "x-anthropic-billing-header" not in played.stagehand.prompts[0]


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "policy"])
def test_a_tool_found_late_and_an_empty_answer(model: str, tmp_path: Path) -> None:
    """Under a name that it does not know, system messages stand in the middle of the list."""
    lines = [
        call("ToolSearch", query="select:WebFetch"),
        bash("printf hello > out.txt"),
        "",
        "All is done.",
    ]
    played = perform(
        ClaudeCode(model=model), Part("ALPHA", [*lines]), instruction=TASK, base=tmp_path
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {"out.txt": "hello"}, why
    assert_sampled_once(played)
    assert_appends(played.calls[:3], why)
    found = played.stagehand.prompts[1].rpartition("<tool_response>")[2]
    assert '"name": "WebFetch"' in found, why
    empty, last = played.calls[2:]
    assert last.breaks == ("dropped turn",), why
    assert shared_tok(empty, last) > empty.prompt_tok - 8, why
    assert played.select(FilterConfig()).dropped == {2: DEAD_LEAF}, why


def test_sub_agents_at_once_have_chains_of_their_own(tmp_path: Path) -> None:
    def below(name: str) -> list[str]:
        return [bash(f"echo {name} > {name}.txt; sleep 0.5"), bash("ls"), f"Found {name}."]

    played = perform(
        ClaudeCode(),
        Part(
            "ALPHA",
            [
                at_once(ask("Task BETA: look."), ask("Task GAMMA: look.")),
                Held(bash("sleep 1")),
                "All is done.",
            ],
        ),
        Part("BETA", [*below("b")]),
        Part("GAMMA", [*below("g")]),
        instruction=TASK,
        base=tmp_path,
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {"b.txt": "b\n", "g.txt": "g\n"}, why
    assert_sampled_once(played)
    assert_no_turn_lost(played)
    chains = dict.fromkeys(c.chain for c in played.calls)
    assert len(chains) == 3 and all(len(played.chain(name)) == 3 for name in chains), why
    for name in chains:
        role = Role.MAIN if name == "main" else Role.SUBAGENT
        assert {c.role for c in played.chain(name)} == {role}, why
        first, *later = played.chain(name)
        assert first.breaks == (() if name == "main" else ("sub-agent",)), why
        assert_appends([first, *later], why)
        assert not any(c.breaks for c in later), why
    assert played.select(ALL_ROLES).leaves == 3
    assert "Found b." in played.stagehand.prompts[-1] and "Found g." in played.stagehand.prompts[-1]
    beta, gamma = (played.chain(name)[0] for name in chains if name != "main")
    assert shared_tok(beta, gamma) > 0.9 * beta.prompt_tok  # one root under both


def test_a_sub_agent_can_be_waited_for(tmp_path: Path) -> None:
    played = perform(
        ClaudeCode(parallel_agents=False),
        Part("ALPHA", [ask("Task BETA: look."), "All is done."]),
        Part("BETA", ["Found it."]),
        instruction=TASK,
        base=tmp_path,
    )
    assert played.result.returncode == 0, played.explain()
    assert_sampled_once(played)
    assert roles_of(played) == [Role.MAIN, Role.SUBAGENT, Role.MAIN]
    assert_appends(played.chain())


def test_compacts_in_time_for_our_window(tmp_path: Path) -> None:
    """It summarises before a prompt is refused, goes on from the summary, and keeps a turn pair."""
    listing = "\n".join(f"line {number} of a long listing" for number in range(900))
    lines = [bash(f"cat in/listing.txt; echo {number}") for number in range(4)]
    played = perform(
        ClaudeCode(),
        Part(
            "CRITICAL: Respond with TEXT ONLY",
            ["<summary>Task ALPHA: the listing was read.</summary>"],
            last_message=True,
        ),
        Part("ALPHA", [*lines, bash("printf hello > out.txt"), "All is done."]),
        instruction=TASK,
        base=tmp_path,
        inputs={"in/listing.txt": listing},
        window_tok=60_000,
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
    assert_appends(after[1:], why)
    # The call that summarises shares the prefix, but leaves out the newest turn, which it keeps.
    assert any(extends(summary.prompt_ids, call) for call in before), why
    assert summary.breaks == ("compaction",) and after[0].breaks == ("compaction",), why
    assert [span.call_id for span in after[0].spans] == [before[-1].call_id], why
    assert "the listing was read" in played.stagehand.prompts[at + 1]
    root = min(shared_tok(call, after[0]) for call in before)
    assert root > 10_000  # system prompt and tools are shared
    assert all(b.prompt_tok + b.completion_tok <= 60_000 for b in played.calls)


def test_sees_a_tasks_servers_from_the_first_call(tmp_path: Path) -> None:
    lines = [call("mcp__words__reverse", word="olleh"), "All is done."]
    played = perform(
        ClaudeCode(),
        Part("ALPHA", [*lines]),
        instruction=TASK,
        base=tmp_path,
        servers=[WORDS],
    )
    why = played.explain()
    assert played.result.returncode == 0, why
    first, last = played.stagehand.prompts
    assert '"name": "mcp__words__reverse"' in first.rpartition("\n</tools>")[0], why
    assert "hello" in last.rpartition("<tool_response>")[2], why
    assert_sampled_once(played)
    assert_appends(played.calls, why)

"""Leads the real OpenClaw through its work in each of the three protocols that it speaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.openclaw import SESSION, Api, OpenClaw
from clawgym_jax.tree.filters import DEAD_LEAF, FilterConfig
from tests.harness.stagehand import (
    Part,
    Played,
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

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(300)]

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-"
TASK = "Task ALPHA: correct the notes."
NOTES = {"in/notes.txt": "the notes\n"}
READ = call("read", path="in/notes.txt")
EDIT = call("edit", path="in/notes.txt", edits=[{"oldText": "the", "newText": "my"}])
WORK = [
    "I look first.\n" + READ,
    at_once(call("exec", command="sleep 1; printf hello > out.txt; echo slow"), READ),
    EDIT,
    "<think>\nNearly there.\n</think>\n\n" + READ,
    "All is done.",
]


def work(base: Path, harness: OpenClaw, *lines: str) -> Played:
    return perform(harness, Part("ALPHA", [*lines]), instruction=TASK, base=base, inputs=NOTES)


def assert_worked(played: Played) -> None:
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {"in/notes.txt": "my notes\n", "out.txt": "hello"}, why
    assert set(roles_of(played)) == {Role.MAIN} and {c.chain for c in played.calls} == {"main"}
    assert_sampled_once(played)


def test_appends_in_the_responses_api(tmp_path: Path) -> None:
    """The default. A malformed call before anything changed: the same body again."""
    malformed = call_text("read", '{"path": "in/no')
    played = work(tmp_path, OpenClaw(), malformed, *WORK)
    why = played.explain()
    assert_worked(played)
    dropped, *rest = played.calls
    assert {c.protocol for c in played.calls} == {"openai-responses"}
    assert rest[0].prompt_ids.tolist() == dropped.prompt_ids.tolist(), why
    assert rest[0].breaks == ("retry",) and rest[0].attempt == 1, why
    assert_appends(rest, why)
    selection = played.select(FilterConfig())
    assert selection.dropped == {0: DEAD_LEAF}  # what the program threw away, under its name
    assert selection.leaves == 2 and len(selection.kept) == len(WORK)
    opening = played.stagehand.prompts[0]
    assert f"sessionId={SESSION}" in opening and not re.search(UUID, opening)  # rollouts share it
    results = played.stagehand.prompts[3].rpartition("<|im_start|>user")[2]
    assert 0 < results.index("slow") < results.index("the notes")


@pytest.mark.parametrize(
    "api",
    ["openai-completions", pytest.param("anthropic-messages", marks=pytest.mark.slow)],
)
def test_the_moving_tail_is_named_and_no_turn_is_lost(api: Api, tmp_path: Path) -> None:
    played = work(tmp_path, OpenClaw(api=api), *WORK)
    why = played.explain()
    assert_worked(played)
    assert_no_turn_lost(played)
    first, *later = played.calls
    assert first.breaks == () and all(c.breaks == ("edited history",) for c in later), why
    for before, after in zip(played.calls, later, strict=False):
        assert after.continues == (*before.continues, before.call_id), why
        assert before.prompt_tok - 100 < shared_tok(before, after) < before.prompt_tok, why


@pytest.mark.slow
def test_without_tools_for_running_programs_every_api_appends(tmp_path: Path) -> None:
    harness = OpenClaw(api="openai-completions", denied=("process", "sessions_spawn"))
    played = work(tmp_path, harness, *WORK)
    assert_worked(played)
    assert_appends(played.calls, played.explain())
    assert played.select(FilterConfig()).leaves == 1


def test_gives_up_on_a_malformed_call_after_a_change_and_finds_a_tasks_tool(
    tmp_path: Path,
) -> None:
    lines = [
        call("tool_call", id="words__reverse", args={"word": "olleh"}),
        call("exec", command="printf hello > out.txt"),
        call_text("exec", '{"command": "ls'),
    ]
    played = perform(
        OpenClaw(), Part("ALPHA", [*lines]), instruction=TASK, base=tmp_path, servers=[WORDS]
    )
    why = played.explain()
    assert played.result.returncode == 1 and played.files == {"out.txt": "hello"}, why
    assert "hello" in played.stagehand.prompts[1].rpartition("<tool_response>")[2], why
    assert_sampled_once(played)
    assert_appends(played.calls, why)
    assert_no_turn_lost(played)
    assert played.trace.causes == {"malformed tool call": 1}


def test_compacts_in_calls_of_their_own_and_keeps_the_newest_turn(tmp_path: Path) -> None:
    """After an overflow: one call or more under another root, then the old root with a summary."""
    listing = "\n".join(f"line {number} of a long listing" for number in range(600))
    lines = [call("exec", command=f"cat in/listing.txt; echo {number}") for number in range(5)]
    played = perform(
        OpenClaw(),
        Part("ummar", ["Task ALPHA: the listing was read."] * 9, last_message=True),
        Part("ALPHA", [*lines, call("exec", command="printf hello > out.txt"), "All is done."]),
        instruction="Task ALPHA: read on.",
        base=tmp_path,
        inputs={"in/listing.txt": listing},
        window_tok=30_000,
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files["out.txt"] == "hello", why
    assert_sampled_once(played, all_said=False)
    assert_no_turn_lost(played)
    roles = roles_of(played)
    at, summaries = roles.index(Role.COMPACTION), roles.count(Role.COMPACTION)
    assert set(roles[at : at + summaries]) == {Role.COMPACTION}, why  # in a row
    before, after = played.calls[:at], played.calls[at + summaries :]
    assert_appends(before, why)
    assert_appends(after, why)
    assert after[0].breaks == ("compaction",) and after[0].continues == (before[-1].call_id,), why
    assert shared_tok(before[-1], after[0]) > 5000  # system prompt and tools
    assert shared_tok(before[-1], played.calls[at]) < 100

"""The real Qwen Code, led through a script: its history only ever grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.qwen_code import QwenCode
from tests.harness.stagehand import (
    ALL_ROLES,
    Part,
    assert_appends,
    assert_no_turn_lost,
    assert_sampled_once,
    perform,
    roles_of,
)
from tests.proxy.support import call_text

pytestmark = [
    pytest.mark.docker,
    pytest.mark.real_harness,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
NOTES = "/workspace/notes.txt"


def shell(command: str) -> str:
    arguments = {"command": command, "description": "Look", "is_background": False}
    return call_text("run_shell_command", arguments)


def test_read_edit_parallel_malformed_done(tmp_path: Path) -> None:
    lines = [
        "I read the notes.\n" + call_text("read_file", {"file_path": NOTES}),
        call_text("edit", {"file_path": NOTES, "old_string": "beta", "new_string": "gamma"}),
        call_text("write_file", {"file_path": "/workspace/a.txt", "content": "first\n"})
        + "\n"
        + shell("printf second > b.txt; pwd"),
        call_text("read_file", '{"file_path": "/workspace/no') + "\n" + shell("echo went on"),
        "The notes are edited.",
    ]
    parts = [Part("Edit the notes", list(lines))]
    files = {"notes.txt": "alpha\nbeta\n"}
    played = perform(QwenCode(), *parts, instruction="Edit the notes.", base=tmp_path, inputs=files)
    why = played.explain()

    assert played.result.returncode == 0 and b"The notes are edited." in played.result.stdout, why
    assert played.files["notes.txt"] == "alpha\ngamma\n", why
    assert (played.files["a.txt"], played.files["b.txt"]) == ("first\n", "second"), why
    assert_sampled_once(played)
    assert roles_of(played) == [Role.MAIN] * 5, why
    assert {call.chain for call in played.calls} == {"main"}
    assert_appends(played.calls, why)
    assert played.select(ALL_ROLES).leaves == 1
    assert_no_turn_lost(played)
    results = played.stagehand.prompts[-1]
    assert "alpha" in results and "went on" in results


def test_a_sub_agent_has_a_chain_of_its_own(tmp_path: Path) -> None:
    ask = {
        "description": "Count lines",
        "prompt": "Count the lines of the notes.",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    }
    parts = [
        Part("Ask somebody", [call_text("agent", ask), "There are two lines."]),
        Part("Count the lines of the notes.", [shell("wc -l < notes.txt"), "Two."]),
    ]
    files = {"notes.txt": "alpha\nbeta\n"}
    played = perform(QwenCode(), *parts, instruction="Ask somebody.", base=tmp_path, inputs=files)
    why = played.explain()

    assert played.result.returncode == 0 and b"There are two lines." in played.result.stdout, why
    assert_sampled_once(played)
    assert roles_of(played) == [Role.MAIN, Role.SUBAGENT, Role.SUBAGENT, Role.MAIN], why
    (below,) = {call.chain for call in played.calls} - {"main"}
    assert_appends(played.chain("main"), why)
    assert played.chain(below)[0].breaks == ("sub-agent",)
    assert_appends(played.chain(below), why)
    assert played.select(ALL_ROLES).leaves == 2
    assert_no_turn_lost(played)


def test_a_compaction_starts_the_history_anew(tmp_path: Path) -> None:
    """Its reminders are missing from the first call after it and back in the second. It keeps the
    last tool call and puts words of its own before it, which may not be lost: so it is context.
    """
    parts = [
        Part("<state_snapshot>", ["<state_snapshot>to 4000</state_snapshot>"], last_message=True),
        Part("<state_snapshot>to 4000", [shell("echo went on"), "Counted."]),
        Part("Count to", [shell(f"seq {n}000 {n + 1}200") for n in (1, 2, 3)]),
    ]
    how = {"instruction": "Count to 4000.", "base": tmp_path, "window_tok": 32_000}
    played = perform(QwenCode(), *parts, **how)
    why = played.explain()

    assert played.result.returncode == 0 and b"Counted." in played.result.stdout, why
    assert_sampled_once(played)
    assert {call.chain for call in played.calls} == {"main"}
    roles = [Role.MAIN] * 3 + [Role.COMPACTION] + [Role.MAIN] * 2
    assert roles_of(played) == roles, why
    before, (summary, after, last) = played.calls[:3], played.calls[3:]
    assert_appends(before, why)
    assert summary.breaks == ("compaction",), why
    assert summary.continues == tuple(call.call_id for call in before), why
    assert after.breaks == ("compaction", "edited turn") and after.continues == (), why
    assert last.breaks == ("edited history", "edited turn"), why
    assert last.continues == (after.call_id,), why
    assert_no_turn_lost(played)

"""The real opencode, led through a script: a title aside, its history only ever grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.opencode import OpenCode
from clawgym_jax.tree.filters import FilterConfig
from tests.harness.stagehand import (
    ALL_ROLES,
    Part,
    Played,
    assert_appends,
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


def assert_only_the_title_untrained(played: Played) -> None:
    selection = played.select(FilterConfig())
    untrained = {played.calls[i].role: reason for i, reason in selection.dropped.items()}
    assert untrained == {Role.TITLE: "auxiliary call: title"}, played.explain()
    assert selection.leaves == 1


def title() -> Part:
    return Part("Generate a title for this conversation", ["Notes"])


def shell(command: str) -> str:
    return call_text("bash", {"command": command, "description": "Look"})


def test_read_edit_parallel_malformed_done(tmp_path: Path) -> None:
    lines = [
        "I read the notes.\n" + call_text("read", {"filePath": NOTES}),
        call_text("edit", {"filePath": NOTES, "oldString": "beta", "newString": "gamma"}),
        call_text("write", {"filePath": "/workspace/a.txt", "content": "first\n"})
        + "\n"
        + shell("printf second > b.txt; pwd"),
        call_text("read", '{"filePath": "/workspace/no') + "\n" + shell("echo went on"),
        call_text("no_such_tool", {"x": 1}),
        "The notes are edited.",
    ]
    instruction = 'Edit the "notes".'
    parts = [title(), Part(instruction, list(lines))]
    files = {"notes.txt": "alpha\nbeta\n"}
    played = perform(OpenCode(), *parts, instruction=instruction, base=tmp_path, inputs=files)
    why = played.explain()

    assert played.result.returncode == 0 and b"The notes are edited." in played.result.stdout, why
    assert played.files["notes.txt"] == "alpha\ngamma\n", why
    assert (played.files["a.txt"], played.files["b.txt"]) == ("first\n", "second"), why
    assert_sampled_once(played)
    assert sorted(roles_of(played)) == [Role.MAIN] * 6 + [Role.TITLE], why
    assert_appends(played.chain("main"), why)
    assert [call.role for call in played.chain("title")] == [Role.TITLE]
    assert_only_the_title_untrained(played)
    results = played.stagehand.prompts[-1]
    assert "alpha" in results and "went on" in results
    assert f"<|im_start|>user\n{instruction}<|im_end|>" in results  # as it was given, unquoted


def test_a_sub_agent_has_a_chain_of_its_own(tmp_path: Path) -> None:
    ask = {
        "description": "Count lines",
        "prompt": "Count the lines of the notes.",
        "subagent_type": "general",
    }
    parts = [
        title(),
        Part("Ask somebody", [call_text("task", ask), "There are two lines."]),
        Part("Count the lines of the notes.", [shell("wc -l < notes.txt"), "Two."]),
    ]
    files = {"notes.txt": "alpha\nbeta\n"}
    played = perform(OpenCode(), *parts, instruction="Ask somebody.", base=tmp_path, inputs=files)
    why = played.explain()

    assert played.result.returncode == 0 and b"There are two lines." in played.result.stdout, why
    assert_sampled_once(played)
    main = played.chain("main")
    assert [call.role for call in main] == [Role.MAIN] * 2, why
    (below,) = {call.chain for call in played.calls} - {"main", "title"}
    assert [call.role for call in played.chain(below)] == [Role.SUBAGENT] * 2, why
    assert_appends(main, why)
    assert played.chain(below)[0].breaks == ("sub-agent",), why
    assert_appends(played.chain(below), why)
    assert played.select(ALL_ROLES).leaves == 3


def test_a_compaction_starts_the_history_anew(tmp_path: Path) -> None:
    """A title in the task does not make the call for a summary one for a title."""
    instruction = "Count, and give it a title."
    counts = [shell(f"seq {n}000 {n}999; echo counted") for n in (1, 2, 3)]
    parts = [
        title(),
        Part("<conversation>", ["Counted to 4000."], last_message=True),
        Part("Counted to 4000.", [shell("echo went on"), "Counted."]),
        Part(instruction, [*counts, "Nearly done."]),
    ]
    how = {"instruction": instruction, "base": tmp_path, "window_tok": 24_000}
    played = perform(OpenCode(), *parts, **how)
    why = played.explain()

    assert played.result.returncode == 0 and b"Counted." in played.result.stdout, why
    assert_sampled_once(played)
    main = played.chain("main")
    roles = [call.role for call in main]
    assert roles == [Role.MAIN] * 4 + [Role.COMPACTION] + [Role.MAIN] * 2, why
    assert_appends(main[:4], why)
    assert main[4].breaks == main[5].breaks == ("compaction",), why
    assert main[5].continues == (main[4].call_id,)  # the summary, as it was sampled
    assert_appends(main[5:], why)
    kept = [played.calls[i] for i in played.select(FilterConfig()).kept]
    assert kept == [call for call in main if call.role is Role.MAIN], why

"""Leads the real pi through its work: four tools, one conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.pi import Pi
from clawgym_jax.tree.filters import FilterConfig
from tests.harness.stagehand import (
    Part,
    assert_appends,
    assert_no_turn_lost,
    assert_sampled_once,
    at_once,
    call,
    perform,
    roles_of,
)
from tests.proxy.support import call_text

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(240)]

NOTES = {"in/notes.txt": "the notes\n"}
READ = call("read", path="in/notes.txt")


def test_works_and_only_appends(tmp_path: Path) -> None:
    """pi repairs the broken call, and what it shows of it later is still known by its id."""
    lines = [
        "I look first.\n" + READ,
        at_once(call("bash", command="sleep 1; printf hello > out.txt; echo slow"), READ),
        call("edit", path="in/notes.txt", edits=[{"oldText": "the", "newText": "my"}]),
        call_text("bash", '{"command": "echo repaired > broken.txt'),
        "<think>\nNearly there.\n</think>\n\n" + READ,
        call("no_such_tool", path="in"),
        "All is done.",
    ]
    played = perform(
        Pi(),
        Part("ALPHA", [*lines]),
        instruction="Task ALPHA: correct the notes.",
        base=tmp_path,
        inputs=NOTES,
    )
    why = played.explain()
    assert played.result.returncode == 0 and b"All is done." in played.result.stdout, why
    assert played.files == {
        "in/notes.txt": "my notes\n",
        "out.txt": "hello",
        "broken.txt": "repaired\n",
    }, why
    assert_sampled_once(played)
    assert_appends(played.calls, why)
    assert_no_turn_lost(played)
    assert set(roles_of(played)) == {Role.MAIN} and len(played.calls) == len(lines), why
    assert played.select(FilterConfig()).leaves == 1
    assert played.trace.causes == {"malformed tool call": 1}
    results = played.stagehand.prompts[2].rpartition("<|im_start|>user")[2]
    assert 0 < results.index("slow") < results.index("the notes")

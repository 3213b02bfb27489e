"""What every real program must have in its image: a constant place, and nobody but the proxy.

Not here: what each program does with its tools (test_drive_*.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.interfaces import Harness
from clawgym_jax.core.types import Role
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.codex import Codex
from clawgym_jax.harness.openclaw import OpenClaw
from clawgym_jax.harness.pi import Pi
from tests.harness.stagehand import (
    Part,
    assert_appends,
    assert_sampled_once,
    call,
    perform,
    roles_of,
)

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(240)]

WHERE = "printf hello > out.txt && pwd && hostname && id -un"
HARNESSES = [
    pytest.param(Pi(), call("bash", command=WHERE), id="pi"),
    pytest.param(ClaudeCode(), call("Bash", command=WHERE, description="Look"), id="claude_code"),
    pytest.param(OpenClaw(), call("exec", command=WHERE), id="openclaw"),
    pytest.param(Codex(), call("exec_command", cmd=WHERE), id="codex"),
]


@pytest.mark.parametrize(("harness", "look"), HARNESSES)
def test_a_real_harness_works_through_the_proxy(
    harness: Harness, look: str, tmp_path: Path
) -> None:
    played = perform(
        harness,
        Part("ALPHA", [look, "The file is written."]),
        instruction="- Task ALPHA: write hello to out.txt.\n--help",  # no option of the program
        base=tmp_path,
    )
    why = played.explain()
    assert played.result.returncode == 0, why
    assert b"The file is written." in played.result.stdout, why
    assert played.files == {"out.txt": "hello"}, why
    assert_sampled_once(played)
    assert_appends(played.calls, why)
    assert [each.protocol for each in played.calls] == [harness.protocol] * 2
    assert roles_of(played) == [Role.MAIN] * 2
    assert {each.chain for each in played.calls} == {"main"}
    assert "/workspace\nsandbox\nagent" in played.stagehand.prompts[1]


@pytest.mark.parametrize("harness", [each.values[0] for each in HARNESSES], ids=lambda h: h.name)
def test_rollouts_of_a_task_share_their_first_prompt(harness: Harness, tmp_path: Path) -> None:
    """All of it but a time of day: what a GRPO group packs once. `pytest -s` prints the lengths."""
    calls = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        played = perform(
            harness, Part("ALPHA", ["Done."]), instruction="Task ALPHA: done.", base=folder
        )
        calls.append(played.calls[0])
    one, two = calls
    shared = common_prefix(one.prompt_ids, two.prompt_ids)
    print(f"{harness.name}: {shared} of {one.prompt_tok} tokens shared")
    assert shared > 0.95 * max(one.prompt_tok, two.prompt_tok)


def test_a_harness_that_never_called_us_is_seen(tmp_path: Path) -> None:
    """A16: another base URL; nobody is there, and no call is recorded."""
    played = perform(
        ClaudeCode(max_retries=0),
        Part("ALPHA", []),
        instruction="Task ALPHA: write.",
        base=tmp_path,
        url="http://127.0.0.1:9",
    )
    assert played.result.returncode != 0
    assert played.calls == () and played.trace.failure == "0 calls captured"
    assert b'"is_error":true' in played.result.stdout

"""Launch plans of the real harnesses: pinned, complete, and dependent on their arguments only."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from clawgym_jax.core.interfaces import Endpoint, Harness, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness import claude_code, pi
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.pi import Pi
from clawgym_jax.sandbox import recipes

ENDPOINT = Endpoint("http://127.0.0.1:8080/e/abc", "key-abc", "policy", 40_000, 2000)
INSTRUCTION = "Do it; $(rm) 'now'\n--help"


def view(headers: Mapping[str, str] = {}, system: str = "s", last: str = "u") -> RequestView:
    return RequestView(headers, system, "u", last, ("Bash",))


@pytest.mark.parametrize("harness", [Pi(), ClaudeCode()], ids=lambda h: h.name)
def test_plans_are_explicit(harness: Harness) -> None:
    plan = harness.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent")
    assert plan == harness.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent")
    assert INSTRUCTION in plan.argv  # one argument, whatever is in it
    assert plan.env["HOME"] == "/home/agent"
    assert recipes.HARNESS_DIR in plan.env["PATH"]
    assert harness.image in recipes.RECIPES
    told = json.dumps(dict(plan.env)) + "".join(text.decode() for text in plan.files.values())
    for what in (ENDPOINT.base_url, ENDPOINT.key, str(ENDPOINT.window_tok), str(ENDPOINT.max_tok)):
        assert what in told
    assert all(not name.startswith("/") for name in plan.files)


def test_versions_are_those_of_the_images() -> None:
    assert recipes.PI.endswith(f"@{pi.VERSION}")
    assert recipes.CLAUDE_CODE.endswith(f"@{claude_code.VERSION}")


def test_roles_and_chains_of_claude_code() -> None:
    harness = ClaudeCode()
    assert (harness.chain(view()), harness.role(view())) == ("main", Role.MAIN)
    below = view({"x-claude-code-agent-id": "a1"})
    assert (harness.chain(below), harness.role(below)) == ("a1", Role.SUBAGENT)
    compaction = view(last="CRITICAL: Respond with TEXT ONLY. Summarise.")
    assert harness.role(compaction) is Role.COMPACTION


def test_roles_and_chains_of_pi() -> None:
    assert (Pi().chain(view()), Pi().role(view())) == ("main", Role.MAIN)


def test_claude_codes_prompt_is_its_own_unless_asked() -> None:
    """--tools and --system-prompt are the program's own flags; neither is there by default."""
    full = ClaudeCode().launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent").argv
    assert "--tools" not in full and "--system-prompt" not in full
    small = ClaudeCode(tools=("Bash", "Read"), system_prompt="Work.")
    argv = small.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent").argv
    assert list(argv) == [*full, "--tools", "Bash,Read", "--system-prompt", "Work."]

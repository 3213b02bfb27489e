"""Launch plans of the real harnesses: pinned, complete, and dependent on their arguments only."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from clawgym_jax.core.interfaces import Endpoint, Harness, McpServer
from clawgym_jax.harness import claude_code, codex, openclaw, pi
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.codex import Codex
from clawgym_jax.harness.openclaw import OpenClaw
from clawgym_jax.harness.pi import Pi
from clawgym_jax.sandbox import recipes

ENDPOINT = Endpoint("http://127.0.0.1:8080/e/abc", "key-abc", "policy", 40_000, 2000)
INSTRUCTION = "Do it; $(rm) 'now'\n--help"


HARNESSES = [
    Pi(),
    ClaudeCode(),
    Codex(),
    OpenClaw(),
    OpenClaw(api="openai-completions"),
    OpenClaw(api="anthropic-messages"),
]
UNTOLD = {"codex": {str(ENDPOINT.max_tok)}}  # no setting for the length of an answer


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda h: f"{h.name}-{h.protocol}")
def test_plans_are_explicit(harness: Harness) -> None:
    plan = harness.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent")
    assert plan == harness.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent")
    assert INSTRUCTION in plan.argv  # one argument, whatever is in it
    assert plan.env["HOME"] == "/home/agent"
    assert recipes.HARNESS_DIR in plan.env["PATH"]
    assert harness.image in recipes.RECIPES
    told = json.dumps(dict(plan.env)) + "".join(text.decode() for text in plan.files.values())
    facts = {ENDPOINT.base_url, ENDPOINT.key, str(ENDPOINT.window_tok), str(ENDPOINT.max_tok)}
    for what in facts - UNTOLD.get(harness.name, set()):
        assert what in told
    assert all(not name.startswith("/") for name in plan.files)


def test_versions_are_those_of_the_images() -> None:
    assert recipes.PI.endswith(f"@{pi.VERSION}")
    assert recipes.CLAUDE_CODE.endswith(f"@{claude_code.VERSION}")
    assert recipes.OPENCLAW.endswith(f"@{openclaw.VERSION}")
    assert recipes.CODEX.endswith(f"@{codex.VERSION}")


def test_claude_codes_prompt_is_its_own_unless_asked() -> None:
    """--tools and --system-prompt are the program's own flags; neither is there by default."""
    full = ClaudeCode().launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent").argv
    assert "--tools" not in full and "--system-prompt" not in full
    small = ClaudeCode(tools=("Bash", "Read"), system_prompt="Work.")
    argv = small.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent").argv
    *flags, dashes, instruction = full
    own = ["--tools", "Bash,Read", "--system-prompt", "Work."]
    assert list(argv) == [*flags, *own, dashes, instruction] and dashes == "--"


def test_codexs_configuration_is_toml_whatever_is_in_it() -> None:
    server = McpServer("notes", ('say "hi"\n', "ü \\ 'x'"), {"A.B": "{workspace}"})
    plan = Codex().launch(ENDPOINT, INSTRUCTION, "/work space", "/home/agent", [server])
    config = tomllib.loads(plan.files[".codex/config.toml"].decode())
    told = {"command": 'say "hi"\n', "args": ["ü \\ 'x'"], "env": {"A.B": "/work space"}}
    assert config["mcp_servers"] == {"notes": told}
    assert config["model_providers"]["proxy"]["base_url"] == f"{ENDPOINT.base_url}/v1"


@pytest.mark.parametrize("window_tok", [8_000, 20_000, 40_000, 200_000])
def test_codex_leaves_room_for_an_answer_and_a_tools_result(window_tok: int) -> None:
    endpoint = replace(ENDPOINT, window_tok=window_tok)
    plan = Codex().launch(endpoint, INSTRUCTION, "/workspace", "/home/agent")
    config = tomllib.loads(plan.files[".codex/config.toml"].decode())
    limit, result = config["model_auto_compact_token_limit"], config["tool_output_token_limit"]
    assert limit > 0 and limit + result + endpoint.max_tok <= window_tok


@pytest.mark.parametrize(("window_tok", "percent"), [(40_000, 34), (99_000, 87), (100_000, None)])
def test_claude_code_is_told_to_compact_early_in_a_small_window(
    window_tok: int, percent: int | None
) -> None:
    """It counts a window below 100k as 100k, so it is told a share of that."""
    plan = ClaudeCode().launch(replace(ENDPOINT, window_tok=window_tok), "Do it.", "/w", "/h")
    told = plan.env.get("CLAUDE_AUTOCOMPACT_PCT_OVERRIDE")
    assert told == (None if percent is None else str(percent))

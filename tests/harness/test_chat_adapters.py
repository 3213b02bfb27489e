"""Launch plans, chains and roles of the adapters that speak Chat Completions."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from clawgym_jax.core.interfaces import Endpoint, Harness, LaunchPlan, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness import mini_swe, opencode, qwen_code
from clawgym_jax.harness.agent_loop import AgentLoop
from clawgym_jax.harness.mcp import corpus_server
from clawgym_jax.harness.mini_swe import MiniSwe
from clawgym_jax.harness.opencode import OpenCode
from clawgym_jax.harness.qwen_code import QwenCode
from clawgym_jax.harness.roles import RoleTracker
from clawgym_jax.sandbox import recipes

ENDPOINT = Endpoint("http://127.0.0.1:8080/e/abc", "key-abc", "policy", 40_000, 2000)
INSTRUCTION = "--help; $(rm) 'now' \"quoted\"\nand {home}"
ADAPTERS: list[Harness] = [AgentLoop(), MiniSwe(), OpenCode(), QwenCode()]


def plan_of(harness: Harness, servers: bool = False) -> LaunchPlan:
    given = [corpus_server("library", "{workspace}/texts")] if servers else []
    return harness.launch(ENDPOINT, INSTRUCTION, "/workspace", "/home/agent", given)


def told(plan: LaunchPlan) -> str:
    settings = [text.decode() for name, text in plan.files.items() if name.endswith(".json")]
    return "\n".join([*plan.argv, *plan.env.values(), *settings])


def view(
    system: str = "You act.",
    last: str = "Do it.",
    tools: tuple[str, ...] = ("bash",),
    headers: Mapping[str, str] | None = None,
) -> RequestView:
    return RequestView(headers or {}, system, "Do it.", last, tools)


@pytest.mark.parametrize("harness", ADAPTERS, ids=lambda h: h.name)
def test_plans_are_explicit(harness: Harness) -> None:
    plan = plan_of(harness)
    assert plan == plan_of(harness)
    assert any(word.removeprefix("--task=").removeprefix("--prompt=") == INSTRUCTION
               for word in plan.argv)  # fmt: skip
    assert plan.env["HOME"] == "/home/agent" and plan.env["PATH"]
    assert harness.image in ("", *recipes.RECIPES)
    for what in (ENDPOINT.base_url + "/v1", ENDPOINT.key, str(ENDPOINT.max_tok), ENDPOINT.model):
        assert what in told(plan)
    assert all(not name.startswith("/") for name in plan.files)


def test_windows_are_told_where_a_program_has_a_place_for_them() -> None:
    assert str(ENDPOINT.window_tok) in told(plan_of(QwenCode()))
    assert str(ENDPOINT.window_tok) in told(plan_of(OpenCode()))


@pytest.mark.parametrize("harness", [h for h in ADAPTERS if h.mcp], ids=lambda h: h.name)
def test_servers_are_told_with_paths_inside(harness: Harness) -> None:
    plan = plan_of(harness, servers=True)
    assert ".mcp_library/corpus_server.py" in plan.files
    assert "/workspace/texts" in told(plan) and "{workspace}" not in told(plan)
    assert "library" not in told(plan_of(harness))


def test_versions_are_those_of_the_images() -> None:
    assert recipes.QWEN_CODE.endswith(f"@{qwen_code.VERSION}")
    assert recipes.OPENCODE.endswith(f"@{opencode.VERSION}")
    assert recipes.MINI_SWE.endswith(f"=={mini_swe.VERSION}")
    assert plan_of(MiniSwe()).env["PYTHONPATH"] == recipes.PYTHON_DIR
    assert plan_of(QwenCode()).env["PATH"] == recipes.PATH


def test_opencode_tells_its_sessions_apart() -> None:
    harness = OpenCode()
    mine = view(headers={"x-session-id": "s1"})
    below = view(headers={"x-session-id": "s2", "x-parent-session-id": "s1"})
    title = view("Generate a title", tools=(), headers={"x-session-id": "s1"})
    summary = view("You summarize.", "[User]: a title", (), {"x-session-id": "s1"})
    assert (harness.chain(mine), harness.role(mine)) == ("main", Role.MAIN)
    assert (harness.chain(below), harness.role(below)) == ("s2", Role.SUBAGENT)
    assert (harness.chain(title), harness.role(title)) == ("title", Role.TITLE)
    assert (harness.chain(summary), harness.role(summary)) == ("main", Role.COMPACTION)


def test_qwen_codes_agents_are_told_apart_by_their_prompts() -> None:
    tracker = RoleTracker(QwenCode())
    assert tracker.classify(view()) == ("main", Role.MAIN)
    chain, role = tracker.classify(view("You search."))
    assert chain != "main" and role is Role.SUBAGENT
    summary = view("Write a <state_snapshot>.", "Now.", ())
    assert tracker.classify(summary) == ("main", Role.COMPACTION)
    assert tracker.classify(view()) == ("main", Role.MAIN)


def test_mini_swes_calls_are_all_the_main_agents() -> None:
    error = view(last="Tool call error: summarize this conversation")
    assert (MiniSwe().chain(error), MiniSwe().role(error)) == ("main", Role.MAIN)


def test_qwen_code_notes_nothing_down_unless_asked() -> None:
    def memory(harness: QwenCode) -> set[bool]:
        settings = json.loads(plan_of(harness).files[".qwen/settings.json"])
        return set(settings["memory"].values())

    assert memory(QwenCode()) == {False} and memory(QwenCode(memory=True)) == {True}

"""Chains and roles of calls whose harness does not name them."""

from __future__ import annotations

import json

import pytest

from clawgym_jax.core.interfaces import RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.codex import Codex
from clawgym_jax.harness.openclaw import OpenClaw
from clawgym_jax.harness.roles import RoleTracker, role_of
from tests.proxy.support import AnyHarness


def view(
    system: str = "You act.",
    first: str = "Do it.",
    last: str = "",
    tools: tuple[str, ...] = ("bash",),
    **headers: str,
) -> RequestView:
    return RequestView(headers, system, first, last or first, tools)


@pytest.mark.parametrize(
    ("seen", "role"),
    [
        (view(), Role.MAIN),
        (view(first="Summarise this conversation between two people in in/talk"), Role.MAIN),
        (view(last="Summarise this conversation so that work can go on."), Role.COMPACTION),
        (view(last="CRITICAL: Respond with TEXT ONLY. Do not call tools."), Role.COMPACTION),
        (
            view(last="This is a CONTEXT CHECKPOINT COMPACTION", tools=()),
            Role.COMPACTION,
        ),
        (view(system="Summarize internal chat history", tools=()), Role.COMPACTION),
        (view(system="Generate a short title", tools=()), Role.TITLE),
        (view(system="You summarize.", last="[User]: Add a title", tools=()), Role.COMPACTION),
        (view(first="Write a title page", last="Write a title page"), Role.MAIN),
        (view(tools=()), Role.MAIN),
        (view(first="Give it a title and sum it up", tools=()), Role.MAIN),
        (view(system="", first="quota", tools=()), Role.PROBE),
        (view(system="", first="Test the parser", tools=()), Role.MAIN),
        (view(system="", first="Summarize internal chat history", tools=()), Role.COMPACTION),
    ],
)
def test_role_by_wording_and_tools(seen: RequestView, role: Role) -> None:
    assert role_of(seen) is role


def test_another_system_prompt_is_another_agent() -> None:
    tracker = RoleTracker(AnyHarness())
    assert tracker.classify(view()) == ("main", Role.MAIN)
    chain, role = tracker.classify(view(system="You search."))
    assert chain.startswith("agent-") and role is Role.SUBAGENT
    assert tracker.classify(view()) == ("main", Role.MAIN)
    assert tracker.classify(view(system="You search.", last="more")) == (chain, role)


def test_agents_of_one_kind_at_once_are_told_apart() -> None:
    """A1 B1 A2 B2 below one main agent, and no header that names them."""
    tracker = RoleTracker(AnyHarness())
    tracker.classify(view())
    below = [view(system="You search.", first=ask) for ask in ("for a", "for b", "for a", "for b")]
    chains = [tracker.classify(each)[0] for each in below]
    assert chains[:2] == chains[2:] and len({*chains, "main"}) == 3


def test_the_main_agent_stays_it_whatever_its_first_message_becomes() -> None:
    """After a compaction, or where a harness rewrites it."""
    tracker = RoleTracker(AnyHarness())
    tracker.classify(view())
    assert tracker.classify(view(first="Go on from this summary.")) == ("main", Role.MAIN)


def test_side_calls_do_not_become_the_main_agent() -> None:
    """opencode asks for a title before the first main call."""
    tracker = RoleTracker(AnyHarness())
    title = view(system="Generate a short title", tools=())
    assert tracker.classify(title) == ("main", Role.TITLE)
    assert tracker.classify(view()) == ("main", Role.MAIN)


def test_a_sub_agents_compaction_stays_on_its_chain() -> None:
    tracker = RoleTracker(AnyHarness())
    tracker.classify(view())
    chain, _ = tracker.classify(view(system="You search."))
    order = "Summarise this conversation, please."
    assert tracker.classify(view(system="You search.", last=order)) == (chain, Role.COMPACTION)
    assert tracker.classify(view(last=order)) == ("main", Role.COMPACTION)


def test_what_the_harness_says_wins() -> None:
    tracker = RoleTracker(AnyHarness())
    tracker.classify(view())
    seen = RequestView({"x-agent": "a7"}, "You act.", "Do it.", "Do it.", ("bash",))
    assert tracker.classify(seen) == ("a7", Role.SUBAGENT)


ORDER = "CRITICAL: Respond with TEXT ONLY. Summarise what was done."
AGENT = {"x-claude-code-agent-id": "a1"}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(), ("main", Role.MAIN)),
        (view(**AGENT), ("a1", Role.SUBAGENT)),
        (view(last=ORDER), ("main", Role.COMPACTION)),
        (view(last=ORDER, **AGENT), ("a1", Role.COMPACTION)),
        (view(first=ORDER), ("main", Role.MAIN)),  # a task may ask for the same
        (view(system="Write a title for this session", tools=()), ("main", Role.TITLE)),
        (view(system="", first="quota", tools=()), ("main", Role.PROBE)),
    ],
)
def test_claude_code_names_its_sub_agents(seen: RequestView, expected: tuple[str, Role]) -> None:
    assert RoleTracker(ClaudeCode()).classify(seen) == expected


def codex_view(kind: str, tools: tuple[str, ...] = ("exec_command",), **below: str) -> RequestView:
    metadata = json.dumps({"request_kind": kind, "thread_id": "t1"})
    headers = {"x-codex-turn-metadata": metadata, "thread-id": "t1", "session-id": "s"}
    return view(last="Go on.", tools=tools, **headers, **below)


PARENT = {"x-codex-parent-thread-id": "t0", "x-openai-subagent": "collab_spawn"}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (codex_view("turn"), ("main", Role.MAIN)),
        (codex_view("compaction", tools=()), ("main", Role.COMPACTION)),
        (codex_view("turn", **PARENT), ("t1", Role.SUBAGENT)),
        (codex_view("turn", **{"x-openai-subagent": "review"}), ("t1", Role.SUBAGENT)),
        (codex_view("compaction", tools=(), **PARENT), ("t1", Role.COMPACTION)),
        (view(**{"x-codex-turn-metadata": "no JSON"}), ("main", Role.MAIN)),
        (view(**{"x-codex-turn-metadata": "[]"}), ("main", Role.MAIN)),
    ],
)
def test_codex_names_threads_and_kinds(seen: RequestView, expected: tuple[str, Role]) -> None:
    assert RoleTracker(Codex()).classify(seen) == expected


def test_codex_does_not_go_by_wording_where_it_says_what_a_request_is() -> None:
    order = "This is a CONTEXT CHECKPOINT COMPACTION"
    metadata = {"x-codex-turn-metadata": '{"request_kind": "turn"}'}
    assert Codex().role(view(last=order, **metadata)) is Role.MAIN
    assert Codex().role(view(last=order, tools=())) is Role.COMPACTION


def test_openclaws_calls_are_of_one_chain() -> None:
    """Its last resort is a call without tools and system prompt that asks for the answer."""
    tracker = RoleTracker(OpenClaw())
    assert tracker.classify(view()) == ("main", Role.MAIN)
    last = "The turn had no visible answer. Give it now, as text."
    assert tracker.classify(view(system="", last=last, tools=())) == ("main", Role.MAIN)

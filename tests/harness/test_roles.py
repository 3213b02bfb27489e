"""Chains and roles of calls whose harness does not name them."""

from __future__ import annotations

import pytest

from clawgym_jax.core.interfaces import RequestView
from clawgym_jax.core.types import Role
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
    assert tracker.classify(view(system="You search.", first="more")) == (chain, role)


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

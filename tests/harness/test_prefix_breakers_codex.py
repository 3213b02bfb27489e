"""What Codex does to its history, at the proxy, without the program.

Each test re-enacts one measured habit with made-up text. Either the next prompt starts with what
was sampled, token for token, or a break is named; and no sampled turn is lost to the filters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.codex import AGENT_HEADER, PARENT_HEADER, TURN_HEADER, Codex
from tests.harness.reenacted import BROKEN, LOOKED, Closed, closed
from tests.harness.stagehand import assert_appends, shared_tok
from tests.proxy.support import LOOK, Say, Stage, call_text, stage, tiny_codec

TOOL = {"type": "function", "strict": False, **LOOK["function"]}  # type: ignore[dict-item]
PATCH_TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: line+"},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents",
    "tools": [{"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}}],
}
THINK = "<think>\nhm\n</think>\n\n"
_NUMBERS = itertools.count()


def message(role: str, text: str) -> dict[str, Any]:
    """Ids of items are random."""
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{next(_NUMBERS)}", "role": role, "content": content}


def opening(task: str = "Do it.") -> list[dict[str, Any]]:
    return [
        message("developer", "You act."),
        message("user", "<environment_context>/workspace</environment_context>"),
        message("user", task),
    ]


def results(output: list[dict[str, Any]], text: Any = "found") -> list[dict[str, Any]]:
    kinds = {
        "function_call": "function_call_output",
        "custom_tool_call": "custom_tool_call_output",
    }
    return [
        {
            "type": kinds[item["type"]],
            "id": f"fco_{next(_NUMBERS)}",
            "call_id": item["call_id"],
            "output": text,
        }
        for item in output
        if item["type"] in kinds
    ]


def headers(kind: str = "turn", thread: str = "t0", **below: str) -> dict[str, str]:
    number = next(_NUMBERS)
    metadata = {"request_kind": kind, "thread_id": thread, "turn_id": number}
    return {
        "session-id": "t0",
        "thread-id": thread,
        "x-client-request-id": f"r{number}",
        TURN_HEADER: json.dumps(metadata),
        **below,
    }


async def said(s: Stage, items: list[Any], told: Any = None, **more: Any) -> list[dict[str, Any]]:
    """The items of the answer."""
    options: dict[str, Any] = {
        "tools": [TOOL, PATCH_TOOL, AGENTS],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "t0",
        "parallel_tool_calls": True,
        "client_metadata": {"turn": next(_NUMBERS)},
        **more,
    }
    response = await s.responses(items, told or headers(), **options)
    assert response.status_code == 200, response.text
    output: list[dict[str, Any]] = response.json()["output"]
    return output


def reenact(*script: Say, play: Any) -> Closed:
    async def run() -> Closed:
        async with stage(*script, harness=Codex(), window_tok=8192) as s:
            await play(s)
            return await closed(s)

    return asyncio.run(run())


def test_ids_and_metadata_change_and_nothing_else_does() -> None:
    """Reasoning comes back as an item, sealed; outputs as a text or as a list of texts."""

    async def play(s: Stage) -> None:
        task = opening()
        first = await said(s, task)
        kept = [{**item, "summary": []} if item["type"] == "reasoning" else item for item in first]
        history = [*({**item, "id": f"msg_{next(_NUMBERS)}"} for item in task), *kept]
        history += results(first)
        second = await said(s, history)
        history += [*second, *results(second, [{"type": "input_text", "text": "Wall time: 1 s"}])]
        third = await said(s, history)
        await said(s, [*history, *third, message("user", "So?")])

    patch = call_text("apply_patch", {"input": '*** Begin Patch\n+é \\ "x"\n*** End Patch\n'})
    played = reenact(THINK + "I look.\n" + LOOKED, patch, THINK + "Found.", "Done.", play=play)
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1, 2, 3) and played.selection.leaves == 1
    assert {c.chain for c in played.calls} == {"main"}


@pytest.mark.parametrize(
    "sampled", [BROKEN, call_text("apply_patch", '{"input": "*** Begin'), call_text("none", {})]
)
def test_calls_that_fail_are_kept_as_they_were_sent(sampled: str) -> None:
    async def play(s: Stage) -> None:
        first = await said(s, opening())
        assert any(item["type"].endswith("call") for item in first)
        history = [*opening(), *first, *results(first, "failed to parse function arguments")]
        await said(s, history)

    played = reenact(sampled, "Done.", play=play)
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1)


def test_results_of_parallel_calls_in_any_order() -> None:
    async def play(s: Stage) -> None:
        first = await said(s, opening())
        slow, fast = results(first)
        await said(s, [*opening(), *first, {**fast, "output": "fast"}, {**slow, "output": "slow"}])

    played = reenact(f"{LOOKED}\n{LOOKED}", "Done.", play=play)
    assert_appends(played.calls)
    shown = tiny_codec().decode(played.calls[1].prompt_ids)
    assert 0 < shown.index("slow") < shown.index("fast")


def test_a_compaction_has_no_tools_and_the_next_root_has_the_summary() -> None:
    order = "You are performing a CONTEXT CHECKPOINT COMPACTION."

    async def play(s: Stage) -> None:
        first = await said(s, opening())
        history = [*opening(), *first, *results(first)]
        second = await said(s, history)
        history += [*second, *results(second)]
        told = headers("compaction", **{"x-codex-window-id": "t0:0"})
        summary = await said(s, [*history, message("user", order)], told, tools=[])
        text = "Another model left this summary:\n" + summary[0]["content"][0]["text"]
        rebuilt = [*opening(), message("user", text)]
        third = await said(s, rebuilt, headers(**{"x-codex-window-id": "t0:1"}))
        await said(s, [*rebuilt, *third, *results(third)])

    played = reenact(LOOKED, LOOKED, "It looked.", LOOKED, "Done.", play=play)
    first, second, summary, after, last = played.calls
    assert_appends([first, second])
    assert summary.role is Role.COMPACTION and summary.breaks == ("compaction",)
    assert summary.continues == (first.call_id, second.call_id)  # though under another root
    assert shared_tok(second, summary) < first.prompt_tok
    assert after.role is Role.MAIN and after.breaks == ("compaction",) and not after.continues
    assert shared_tok(first, after) > first.prompt_tok - 8  # its root again, tools and all
    assert_appends([after, last])
    assert played.selection.kept == (0, 1, 3, 4)
    assert played.dropped == {2: "auxiliary call: compaction"}


def test_sub_agents_at_once_have_threads_of_their_own() -> None:
    """Same session, same instructions, fewer tools; the notice of their end is a user message."""

    def below(thread: str) -> dict[str, str]:
        return headers(thread=thread, **{PARENT_HEADER: "t0", AGENT_HEADER: "collab_spawn"})

    async def play(s: Stage) -> None:
        first = await said(s, opening())
        spawn = next(item for item in first if item["type"] == "function_call")
        assert (spawn["namespace"], spawn["name"]) == ("multi_agent_v1", "spawn_agent")
        tools = {"tools": [TOOL, PATCH_TOOL]}
        a = await said(s, opening("Find x."), below("t1"), **tools)
        b = await said(s, opening("Find x."), below("t2"), **tools)
        await said(s, [*opening("Find x."), *a, *results(a)], below("t1"), **tools)
        await said(s, [*opening("Find x."), *b, *results(b)], below("t2"), **tools)
        notice = message("user", "<subagent_notification>Both are done.</subagent_notification>")
        await said(s, [*opening(), *first, *results(first, '{"agent_id":"t1"}'), notice])

    ask = call_text("multi_agent_v1__spawn_agent", {"message": "Find x."})
    played = reenact(ask, LOOKED, LOOKED, "x", "x", "Done.", play=play)
    assert [c.chain for c in played.calls] == ["main", "t1", "t2", "t1", "t2", "main"]
    for name in ("main", "t1", "t2"):
        assert_appends([c for c in played.calls if c.chain == name])
    assert [c.breaks for c in played.calls[1:3]] == [("sub-agent",)] * 2
    # Two samples for one prompt, and each thread goes on from its own.
    assert [span.call_id for span in played.calls[3].spans] == [played.calls[1].call_id]
    assert [span.call_id for span in played.calls[4].spans] == [played.calls[2].call_id]
    assert played.selection.kept == (0, 5)


def test_the_search_for_tools_goes_back_and_forth_as_items_of_its_own() -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Search tools",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    }

    async def play(s: Stage) -> None:
        tools = {"tools": [TOOL, search]}
        first = await said(s, opening(), **tools)
        call = next(item for item in first if item["type"] == "tool_search_call")
        found = {
            "type": "tool_search_output",
            "call_id": call["call_id"],
            "status": "completed",
            "execution": "client",
            "tools": [AGENTS],
        }
        history = [*opening(), *first, found]
        second = await said(s, history, **tools)
        spawn = next(item for item in second if item["type"] == "function_call")
        assert (spawn["namespace"], spawn["name"]) == ("multi_agent_v1", "spawn_agent")
        await said(s, [*history, *second, *results(second)], **tools)

    ask = call_text("multi_agent_v1__spawn_agent", {"message": "Find x."})
    played = reenact(call_text("tool_search", {"query": "agents"}), ask, "Done.", play=play)
    assert_appends(played.calls)
    assert "spawn_agent" in tiny_codec().decode(played.calls[1].prompt_ids)

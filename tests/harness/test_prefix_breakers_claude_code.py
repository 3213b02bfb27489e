"""What Claude Code does to its history, at the proxy, without the program.

Each test re-enacts one measured habit with made-up text. Either the next prompt starts with what
was sampled, token for token, or a break is named; and no sampled turn is lost to the filters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from clawgym_jax.core.types import Finish, Role
from clawgym_jax.harness.claude_code import AGENT_HEADER, ClaudeCode
from clawgym_jax.tree.filters import DEAD_LEAF
from tests.harness.reenacted import BROKEN, LOOKED, Closed, closed
from tests.harness.stagehand import assert_appends
from tests.proxy.support import (
    LOOK_ANTHROPIC,
    Asked,
    Say,
    Stage,
    call_text,
    completion,
    stage,
    tiny_codec,
)

Blocks = list[dict[str, Any]]
MARK = {"cache_control": {"type": "ephemeral"}}
TASK = {"role": "user", "content": "Do it."}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(use: dict[str, Any], content: Any = "found", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use["id"], "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(blocks: Blocks) -> dict[str, Any]:
    return {"role": "assistant", "content": blocks}


async def said(s: Stage, messages: Sequence[Any], headers: Any = None, **more: Any) -> Blocks:
    """The blocks of the answer."""
    more = {"tools": [LOOK_ANTHROPIC], "thinking": {"type": "adaptive"}, **more}
    response = await s.messages([*messages], headers, **more)
    assert response.status_code == 200, response.text
    blocks: Blocks = response.json()["content"]
    return blocks


def uses(blocks: Blocks) -> Blocks:
    return [block for block in blocks if block["type"] == "tool_use"]


def reenact(*script: Say, play: Any) -> Closed:
    async def run() -> Closed:
        async with stage(*script, harness=ClaudeCode(), window_tok=8192) as s:
            await play(s)
            return await closed(s)

    return asyncio.run(run())


def test_cache_marks_move_to_the_newest_block() -> None:
    async def play(s: Stage) -> None:
        system = [text("You act."), text("Here and now.", **MARK)]
        first = await said(s, [user(text("Do it.", **MARK))], system=system)
        system = [text("You act.", **MARK), text("Here and now.", **MARK)]
        (use,) = uses(first)
        history = [user(text("Do it.")), assistant(first), user(result(use, **MARK))]
        second = await said(s, history, system=system)
        history = [*history[:2], user(result(use)), assistant(second), user(text("So?", **MARK))]
        await said(s, history, system=system)

    played = reenact("<think>\nhm\n</think>\n\n" + LOOKED, "Found.", "Done.", play=play)
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1, 2)


def test_contents_flip_between_a_text_and_a_list_of_one() -> None:
    """With the cache mark it is a list, without a text; so for system messages in the list."""

    async def play(s: Stage) -> None:
        note = {"role": "system", "content": [text("Tools may come later.", **MARK)]}
        first = await said(s, [user(text("Do it.")), note])
        flat_note = {"role": "system", "content": "Tools may come later."}
        (use,) = uses(first)
        history = [TASK, flat_note, assistant(first), user(result(use, [text("found", **MARK)]))]
        second = await said(s, history)
        history = [user(text("Do it.")), flat_note, assistant(first), user(result(use))]
        shown = {"role": "assistant", "content": second[0]["text"]}
        await said(s, [*history, shown, {"role": "user", "content": "So?"}])

    played = reenact(LOOKED, "Found.", "Done.", play=play)
    assert_appends(played.calls)
    assert "Tools may come later." in tiny_codec().decode(played.calls[0].prompt_ids)


@pytest.mark.parametrize("changed", [".cf6; cc_entrypoint=cli", ".307; cc_is_subagent=true"])
def test_the_billing_line_is_no_part_of_a_prompt(changed: str) -> None:
    async def play(s: Stage) -> None:
        billing = "x-anthropic-billing-header: cc_version=2.1.332"
        first = await said(s, [TASK], system=[text(billing + ".307;"), text("You act.")])
        history = [TASK, assistant(first), user(result(uses(first)[0]))]
        await said(s, history, system=[text(f"{billing}{changed};"), text("You act.")])

    played = reenact(LOOKED, "Done.", play=play)
    assert_appends(played.calls)
    assert "billing" not in tiny_codec().decode(played.calls[1].prompt_ids)


@pytest.mark.parametrize(
    "sampled",
    [
        '{"path":"a/b","lines":[1,2]}',
        '{ "lines" : [ 1, 2 ] , "path" : "a\\/b" }',
        '{"path": "\\u0061/b", "lines": [1.0, 2]}',
    ],
)
def test_inputs_are_serialised_anew(sampled: str) -> None:
    """Ids stay; the spelling of what the model wrote does not. Another input with them is told."""

    async def play(s: Stage) -> None:
        first = await said(s, [TASK])
        (use,) = uses(first)
        assert use["input"] == {"path": "a/b", "lines": [1, 2]}
        shown = [{**use, "input": {"lines": [1, 2], "path": "a/b"}}]
        await said(s, [TASK, assistant(shown), user(result(use))])

    played = reenact(call_text("look", sampled), "Done.", play=play)
    assert_appends(played.calls)
    first, second = played.calls
    start = first.prompt_tok
    assert second.prompt_ids[start : start + first.completion_tok].tolist() == list(
        first.completion.ids
    )


def test_results_of_parallel_calls_come_in_the_order_of_completion() -> None:
    async def play(s: Stage) -> None:
        first = await said(s, [TASK])
        slow, fast = uses(first)
        history = [TASK, assistant(first), user(result(fast, "fast"), result(slow, "slow"))]
        second = await said(s, history)
        await said(s, [*history, assistant(second), user(text("So?"))])

    played = reenact(f"{LOOKED}\n{LOOKED}", "Found.", "Done.", play=play)
    assert_appends(played.calls)
    shown = tiny_codec().decode(played.calls[1].prompt_ids)
    assert 0 < shown.index("slow") < shown.index("fast")  # in the order of the calls


def test_what_is_left_of_the_tokens_is_written_once() -> None:
    async def play(s: Stage) -> None:
        history = [TASK]
        for left in (190_000, 180_000, 170_000):
            blocks = await said(s, history)
            reminder = f"<system-reminder>{left} tokens left</system-reminder>"
            found = result(uses(blocks)[0], f"found\n\n{reminder}")
            history += [assistant(blocks), user(found)]
        await said(s, history)

    played = reenact(LOOKED, LOOKED, LOOKED, "Done.", play=play)
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1, 2, 3)


def test_an_empty_answer_is_dropped_and_the_question_before_it_rewritten() -> None:
    """A line end and a second block in the same message: the prefix breaks inside of it."""

    async def play(s: Stage) -> None:
        first = await said(s, [TASK])
        history = [TASK, assistant(first), user(result(uses(first)[0]), text("Go on."))]
        assert await said(s, history) == []
        told = text("[Your previous response had no visible output. Say something.]")
        again = user(result(uses(first)[0]), text("Go on.\n"), told)
        third = await said(s, [TASK, assistant(first), again])
        await said(s, [TASK, assistant(first), again, assistant(third), user(text("So?"))])

    played = reenact(LOOKED, "", "Found.", "Done.", play=play)
    first, empty, after, last = played.calls
    assert_appends([first, empty])
    assert after.breaks == ("dropped turn",) and after.continues == (first.call_id,)
    assert_appends([after, last])
    assert played.selection.kept == (0, 2, 3) and played.dropped == {1: DEAD_LEAF}


@pytest.mark.parametrize("cut", [False, True])
def test_unreadable_inputs_come_back_as_raw_text(cut: bool) -> None:
    """Broken by the model, or by the limit of an answer; the ids of calls tell what it was."""

    def cut_off(_: Asked) -> Any:
        return completion(tiny_codec().encode_rendered(BROKEN).tolist(), Finish.LENGTH)

    async def play(s: Stage) -> None:
        response = await s.messages([TASK], tools=[LOOK_ANTHROPIC], stream=True)
        events = [
            json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")
        ]
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        raw = "".join(e["delta"].get("partial_json", "") for e in events if "delta" in e)
        calls = [block for block in starts if block["type"] == "tool_use"]
        if calls:
            unparsed = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
            shown: Blocks = [{**calls[0], "input": unparsed}]
            told = user(result(calls[0], "The input is no JSON.", is_error=True))
        else:  # what the limit cut off is text
            shown = [text("".join(e["delta"].get("text", "") for e in events if "delta" in e))]
            told = user(text("<system-reminder>Output token limit hit. Go on.</system-reminder>"))
        await said(s, [TASK, assistant(shown), told])

    played = reenact(cut_off if cut else BROKEN, "Done.", play=play)
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1)


def test_an_answer_that_hit_its_limit_is_kept_and_gone_on_from() -> None:
    def cut_off(_: Asked) -> Any:
        return completion(tiny_codec().encode_rendered("The river").tolist(), Finish.LENGTH)

    async def play(s: Stage) -> None:
        first = await said(s, [TASK])
        limit = text("<system-reminder>Output token limit hit. Resume.</system-reminder>")
        await said(s, [TASK, assistant(first), user(limit)])

    played = reenact(cut_off, "flows.", play=play)
    assert_appends(played.calls)


def test_system_messages_stand_in_the_middle_of_the_list() -> None:
    """Newer model names: after the task, and again where the date or the tools change."""

    async def play(s: Stage) -> None:
        options = {"system": "You act.", "output_config": {"effort": "high"}}
        history: list[Any] = [TASK, {"role": "system", "content": "Today is Monday."}]
        first = await said(s, history, **options)
        effort = {"output_config": {"effort": "low"}}
        later = {"role": "system", "content": "A tool came along.", **effort}
        history += [assistant(first), user(result(uses(first)[0])), later]
        second = await said(s, history, **options)
        history += [assistant(second), user(text("So?")), {"role": "system", "content": "Night."}]
        await said(s, history, **options)

    played = reenact(LOOKED, "Found.", "Done.", play=play)
    assert_appends(played.calls)
    shown = tiny_codec().decode(played.calls[2].prompt_ids)
    assert shown.index("Monday") < shown.index("A tool came along.") < shown.index("Night.")
    assert set(call.role for call in played.calls) == {Role.MAIN}


def test_a_tool_that_is_found_late_is_declared_where_it_was_found() -> None:
    """The list of tools grows in the middle; the prompt grows at its end, and only by then."""

    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "description": f"To {name}", "input_schema": {}, **more}

    async def play(s: Stage) -> None:
        tools = [tool("find"), LOOK_ANTHROPIC, tool("never_call", defer_loading=True)]
        first = await said(s, [TASK], tools=tools)
        tools = [tool("fetch", defer_loading=True), *tools]
        reference = {"type": "tool_reference", "tool_name": "fetch"}
        found = user(result(uses(first)[0], [reference]), text("Tool loaded."))
        second = await said(s, [TASK, assistant(first), found], tools=tools)
        history = [TASK, assistant(first), found, assistant(second)]
        await said(s, [*history, user(result(uses(second)[0]))], tools=tools)

    fetched = call_text("fetch", {"from": "x"})
    played = reenact(call_text("find", {"query": "fetch"}), fetched, "Done.", play=play)
    assert_appends(played.calls)
    first, second = (tiny_codec().decode(c.prompt_ids) for c in played.calls[:2])
    assert "To find" in first and "To fetch" not in first
    assert "To fetch" in second.rpartition("<tool_response>")[2] and "never_call" not in second


def test_a_compaction_shares_the_prefix_and_the_next_root_keeps_a_pair() -> None:
    order = "CRITICAL: Respond with TEXT ONLY. Summarise."

    async def play(s: Stage) -> None:
        first = await said(s, [TASK], system="You act.")
        history = [TASK, assistant(first), user(result(uses(first)[0]))]
        second = await said(s, history, system="You act.")
        summary = await said(s, [*history, user(text(order))], system="You act.")
        kept = [assistant(second), user(result(uses(second)[0], "more"))]
        resumed = user(text("This session is being continued.\n" + summary[0]["text"]))
        third = await said(s, [resumed, *kept], system="You act.")
        tail = [assistant(third), user(text("So?"))]
        await said(s, [resumed, *kept, *tail], system="You act.")

    played = reenact(LOOKED, LOOKED, "It looked.", LOOKED, "Done.", play=play)
    first, second, summary, after, last = played.calls
    assert [c.role for c in played.calls].index(Role.COMPACTION) == 2
    assert_appends([first, second])
    assert summary.breaks == ("compaction",) and summary.continues == (first.call_id,)
    assert summary.shared_tok > second.prompt_tok - 5  # all but how an answer opens
    assert after.breaks == ("compaction",) and after.continues == (second.call_id,)
    assert_appends([after, last])
    assert played.selection.kept == (0, 1, 3, 4)
    assert played.dropped == {2: "auxiliary call: compaction"}


def test_sub_agents_at_once_share_a_session_and_differ_in_a_header() -> None:
    async def play(s: Stage) -> None:
        headers = [{"x-claude-code-session-id": "one", AGENT_HEADER: name} for name in ("a", "b")]
        first = await said(s, [TASK], {"x-claude-code-session-id": "one"}, system="You act.")
        asks = [user(text(f"Find {name}.")) for name in ("x", "y")]
        below = [await said(s, [ask], h, system="Find.") for ask, h in zip(asks, headers, strict=1)]
        for ask, blocks, h in zip(asks, below, headers, strict=True):
            await said(
                s, [ask, assistant(blocks), user(result(uses(blocks)[0]))], h, system="Find."
            )
        launched = user(result(uses(first)[0], "Launched."))
        note = user(text("<task-notification>Both are done.</task-notification>"))
        await said(s, [TASK, assistant(first), launched, note], system="You act.")

    played = reenact(*[LOOKED] * 3, "x", "y", "Done.", play=play)
    chains = [c.chain for c in played.calls]
    assert chains == ["main", "a", "b", "a", "b", "main"]
    for name in ("main", "a", "b"):
        assert_appends([c for c in played.calls if c.chain == name])
    assert [c.breaks for c in played.calls[1:3]] == [("sub-agent",)] * 2
    assert played.selection.kept == (0, 5)
    assert set(played.dropped.values()) == {"auxiliary call: sub-agent"}

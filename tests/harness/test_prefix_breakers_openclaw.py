"""What OpenClaw does to its history, at the proxy, without the program.

Each test re-enacts one measured habit with made-up text. Either the next prompt starts with what
was sampled, token for token, or a break is named; and no sampled turn is lost to the filters, save
what the program threw away, which is a leaf with that reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.openclaw import Api, OpenClaw
from clawgym_jax.tree.filters import DEAD_LEAF
from tests.harness.reenacted import BROKEN, LOOKED, Closed, closed
from tests.harness.stagehand import assert_appends, shared_tok
from tests.proxy.support import LOOK, LOOK_ANTHROPIC, Say, Stage, call_text, stage, tiny_codec

SYSTEM = {"role": "system", "content": "You act."}
TASK = {"role": "user", "content": "[Mon 2026-01-05 10:00 UTC] Do it."}
NOTE = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
TAIL = {"role": "user", "content": NOTE.format("Programs that run: none")}


async def said(s: Stage, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The assistant message that answers in the Chat API."""
    response = await s.chat([*messages], **{"tools": [LOOK], **more})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def result(message: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": "found"}


def reenact(*script: Say, play: Any, api: Api = "openai-completions") -> Closed:
    async def run() -> Closed:
        async with stage(*script, harness=OpenClaw(api=api)) as s:
            await play(s)
            return await closed(s)

    return asyncio.run(run())


@pytest.mark.parametrize("changes", [False, True])
def test_the_tail_moves_to_the_end_of_every_call(changes: bool) -> None:
    """Each call ends with a note that the next one has elsewhere, and perhaps in other words."""

    async def play(s: Stage) -> None:
        history = [SYSTEM, TASK]
        for number in range(3):
            running = f"Programs that run: {number if changes else 'none'}"
            message = await said(s, [*history, {"role": "user", "content": NOTE.format(running)}])
            history += [message, result(message)]
        await said(s, [*history, TAIL])

    played = reenact("I look.\n" + LOOKED, LOOKED, LOOKED, "Done.", play=play)
    first, *later = played.calls
    assert first.breaks == ()
    for before, after in zip(played.calls, later, strict=False):
        assert after.breaks == ("edited history",)
        assert after.continues == (*before.continues, before.call_id)
        # All is shared up to the note; what was sampled stands right where the note stood.
        assert [span.length for span in after.spans][-1] == before.completion_tok
        assert shared_tok(before, after) >= before.prompt_tok - tail_tok() - 3
    assert played.selection.kept == (0, 1, 2, 3) and played.selection.leaves == 1


def tail_tok() -> int:
    return int(tiny_codec().encode_rendered(TAIL["content"]).size) + 6


def test_the_tail_moves_in_anthropic_messages_too() -> None:
    note = {"type": "text", "text": TAIL["content"]}

    async def play(s: Stage) -> None:
        async def answer(*messages: Any) -> Any:
            response = await s.messages([*messages], tools=[LOOK_ANTHROPIC], system="You act.")
            return response.json()["content"]

        task = {"role": "user", "content": [{"type": "text", "text": "Do it."}]}
        first = await answer({**task, "content": [*task["content"], note]})
        found = {"type": "tool_result", "tool_use_id": first[0]["id"], "content": "found"}
        shown = {"role": "assistant", "content": first}
        await answer(task, shown, {"role": "user", "content": [found, note]})

    played = reenact(LOOKED, "Done.", play=play, api="anthropic-messages")
    first, second = played.calls
    assert second.breaks == ("edited history",) and second.continues == (first.call_id,)
    assert played.selection.kept == (0, 1) and played.selection.leaves == 1


def test_ids_lose_what_is_not_alphanumeric_and_arguments_their_spelling() -> None:
    """Ours have nothing to lose, and stay; the reader would also take a shortened one."""
    sampled = call_text("look", '{ "path" : "a\\/b", "mode": "\\u0061" }')

    async def play(s: Stage) -> None:
        first = await said(s, [SYSTEM, TASK])
        call = first["tool_calls"][0]
        assert call["id"].isalnum()
        compact = {"name": "look", "arguments": '{"path":"a/b","mode":"a"}'}
        shown = {**first, "content": "", "tool_calls": [{**call, "function": compact}]}
        await said(s, [SYSTEM, TASK, shown, result(first)])

    assert_appends(reenact(sampled, "Done.", play=play).calls)


def responses_items(output: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Items as OpenClaw shows them: no item ids, ids of calls made anew from both, compact JSON."""
    shown = []
    for item in output:
        if item["type"] == "function_call":
            call_id = f"call_{item['call_id']}_{item['id']}_{number:010x}"[:64]
            arguments = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
            name = item["name"]
            shown.append(
                {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
            )
            shown.append({"type": "function_call_output", "call_id": call_id, "output": "found"})
        elif item["type"] == "message":
            shown.append({**{k: item[k] for k in ("type", "role", "content")}})
    calls = [item for item in shown if item["type"] != "function_call_output"]
    return calls + [item for item in shown if item["type"] == "function_call_output"]


@pytest.mark.parametrize("same", [False, True])
def test_responses_makes_ids_of_calls_anew_and_appends(same: bool) -> None:
    """The note stays behind the task; equal turns in a row are still told apart."""
    tool = {"type": "function", **LOOK["function"]}  # type: ignore[dict-item]
    lines = [LOOKED if same else call_text("look", {"path": f"a{n}"}) for n in range(3)]
    lines[1] = f"{lines[1]}\n{lines[1]}"  # in parallel

    async def play(s: Stage) -> None:
        items: list[Any] = [{"type": "message", **message} for message in (SYSTEM, TASK, TAIL)]
        for number in range(4):
            options = {"tools": [tool], "store": False, "max_output_tokens": 60}
            response = await s.responses(items, **options)
            assert response.status_code == 200, response.text
            items += responses_items(response.json()["output"], number)

    played = reenact(*lines, "Done.", play=play, api="openai-responses")
    assert_appends(played.calls)
    assert played.selection.kept == (0, 1, 2, 3) and played.selection.leaves == 1


@pytest.mark.parametrize("first_turn", [False, True])
def test_after_an_error_the_task_is_rewritten(first_turn: bool) -> None:
    """The proxy hides errors, so this is for answers that got lost behind it: a named break."""

    async def play(s: Stage) -> None:
        history: list[Any] = [SYSTEM, TASK]
        if not first_turn:
            message = await said(s, [*history, TAIL])
            history += [message, result(message)]
        await said(s, [*history, TAIL])  # sampled, and lost on its way
        if first_turn:
            queued = f"[Queued user message from a previous active turn] {TASK['content']}"
            history[1] = {"role": "user", "content": queued + "\nContinue the current task."}
        else:
            history.append({"role": "user", "content": "Continue from the transcript."})
        message = await said(s, [*history, TAIL])
        await said(s, [*history, message, result(message), TAIL])

    script = [LOOKED] if not first_turn else []
    played = reenact(*script, "lost", LOOKED, "Done.", play=play)
    lost = len(script)
    after = played.calls[lost + 1]
    assert after.breaks == ("dropped turn",)
    assert played.dropped == {lost: DEAD_LEAF}
    assert {c.chain for c in played.calls} == {"main"}
    assert {c.role for c in played.calls} == {Role.MAIN}


@pytest.mark.parametrize("dropped", [BROKEN, ""])
def test_a_malformed_or_empty_answer_is_thrown_away_and_asked_for_again(dropped: str) -> None:
    """With the very same body; what was thrown away is a sample of its own, under its own name."""

    async def play(s: Stage) -> None:
        first = await said(s, [SYSTEM, TASK, TAIL])
        history = [SYSTEM, TASK, first, result(first)]
        await said(s, [*history, TAIL])
        again = await said(s, [*history, TAIL])
        await said(s, [*history, again, result(again), TAIL])

    played = reenact(LOOKED, dropped, LOOKED, "Done.", play=play)
    _, thrown, again, last = played.calls
    assert thrown.prompt_ids.tolist() == again.prompt_ids.tolist()
    assert (thrown.attempt, again.attempt) == (0, 1) and again.breaks == ("retry",)
    assert thrown.effective.seed != again.effective.seed
    assert last.continues == (played.calls[0].call_id, again.call_id)
    assert played.dropped == {1: DEAD_LEAF} and played.selection.kept == (0, 2, 3)


def test_a_last_resort_call_has_neither_tools_nor_a_system_prompt() -> None:
    """After an empty answer: a text is asked for, of the same agent, and is an answer like any."""

    async def play(s: Stage) -> None:
        first = await said(s, [SYSTEM, TASK])
        history = [SYSTEM, TASK, first, result(first)]
        await said(s, history)
        told = {"role": "user", "content": "The turn had no visible answer. Give it now."}
        await said(s, [TASK, first, result(first), told], tools=[])

    played = reenact(LOOKED, "", "Done.", play=play)
    first, empty, last = played.calls
    assert_appends([first, empty])
    assert last.role is Role.MAIN and last.breaks == ("dropped turn",)
    assert last.continues == (first.call_id,)
    assert played.selection.kept == (0, 2) and played.dropped == {1: DEAD_LEAF}

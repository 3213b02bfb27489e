"""What harnesses of the Chat API do to their history, at the proxy, without the programs.

Each test re-enacts one measured habit with made-up text. Either the next prompt starts with what
was sampled, token for token, or a break is named; and every sampled call stays in the tree, kept
or dropped for a reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from clawgym_jax.core.types import CallRecord, Completion, Delivery, Finish, SamplingParams
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.tree.filters import DEAD_LEAF, FilterConfig, Selection, select_calls
from tests.proxy.support import LOOK, Asked, Say, Stage, call_text, completion, stage, tiny_codec
from tests.proxy.test_retries import until

USER = {"role": "user", "content": "Do it."}
LOOKED = call_text("look", '{"path": "a/b"}')
BROKEN = call_text("look", '{"path": "a/b')
TURN_OPENING_TOK = 3  # <|im_start|>, assistant, newline


def cut_off(text: str) -> Say:
    """A completion that hit its limit."""

    def say(_: Asked) -> Completion:
        return completion(tiny_codec().encode_rendered(text).tolist(), Finish.LENGTH)

    return say


async def said(s: Stage, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The assistant message that answers."""
    more = {"tools": [LOOK], **more}
    response = await s.chat([*messages], **more)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


async def ended(s: Stage) -> tuple[tuple[CallRecord, ...], Selection]:
    trace = await s.proxy.close_episode("ep")
    assert not trace.failure
    selection = select_calls(trace.calls, FilterConfig())
    assert sorted([*selection.kept, *selection.dropped]) == list(range(len(trace.calls)))
    return trace.calls, selection


def result(call: dict[str, Any], content: Any = "found") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def assert_appends(before: CallRecord, after: CallRecord) -> None:
    assert extends(after.prompt_ids, before) and after.breaks == (), after.breaks


# ---- Qwen Code ------------------------------------------------------------------------------


def test_qwen_part_of_an_answer_is_kept_and_merged_with_what_follows() -> None:
    """The stream was cut within the text: what arrived is no turn that anyone sampled."""

    async def run() -> None:
        async with stage("The Elbe flows north to the sea.", "and then west.", "Done.") as s:
            await said(s, [USER])
            partial = {"role": "assistant", "content": "The Elbe flows "}
            resume = {"role": "user", "content": "The connection dropped. Resume."}
            go_on = await said(s, [USER, partial, resume])
            merged = {"role": "assistant", "content": partial["content"] + go_on["content"]}
            await said(s, [USER, merged, {"role": "user", "content": "Go on."}])
            (cut, resumed, last), selection = await ended(s)
            assert resumed.breaks == ("dropped turn", "edited turn") and not resumed.continues
            assert last.breaks == ("dropped turn", "edited turn") and not last.continues
            prefix = cut.prompt_tok
            for call in (resumed, last):
                assert np.array_equal(call.prompt_ids[:prefix], cut.prompt_ids)
            # Nobody can go on from half a turn: both stay in the tree, as leaves with a reason.
            assert selection.dropped == {0: DEAD_LEAF, 1: DEAD_LEAF} and selection.kept == (2,)

    asyncio.run(run())


def test_qwen_a_whole_answer_and_its_continuation_are_merged() -> None:
    """The stream was cut behind the text: one message is two sampled turns, in their own ids."""

    async def run() -> None:
        async with stage("The Elbe flows north", "to the sea.", "Done.") as s:
            first = await said(s, [USER])
            resume = {"role": "user", "content": "The connection dropped. Resume."}
            second = await said(s, [USER, first, resume])
            merged = {"role": "assistant", "content": f"{first['content']} {second['content']}"}
            await said(s, [USER, merged, {"role": "user", "content": "Go on."}])
            (one, two, three), selection = await ended(s)
            assert_appends(one, two)
            assert "merged turns" in three.breaks
            assert three.continues == (one.call_id, two.call_id)
            assert selection.kept == (0, 1, 2) and not selection.dropped

    asyncio.run(run())


@pytest.mark.parametrize("thrown_away", [cut_off("The Elbe flows north and"), ""])
def test_qwen_asks_again_after_an_answer_that_it_does_not_take(thrown_away: Say) -> None:
    """A cut answer with a higher limit, an empty one as it was: a new sample either way."""

    async def run() -> None:
        async with stage(thrown_away, LOOKED, "Done.") as s:
            await said(s, [USER], max_tokens=32000)
            taken = await said(s, [USER], max_tokens=64000)
            await said(s, [USER, taken, result(taken["tool_calls"][0])])
            (first, again, last), selection = await ended(s)
            assert np.array_equal(first.prompt_ids, again.prompt_ids)
            assert (first.attempt, again.attempt) == (0, 1) and again.breaks == ("retry",)
            assert first.effective.seed != again.effective.seed
            assert [c.requested["max_tokens"] for c in (first, again)] == [32000, 64000]
            assert first.effective.max_tok == again.effective.max_tok  # the run's own limit
            assert_appends(again, last)
            assert selection.dropped == {0: DEAD_LEAF} and selection.kept == (1, 2)

    asyncio.run(run())


def test_qwen_sends_contents_as_lists_and_arguments_anew() -> None:
    async def run() -> None:
        async with stage("<think>\nhm\n</think>\n\nI look.\n" + LOOKED, "Done.", "Bye.") as s:
            first = await said(s, [USER])
            call = first["tool_calls"][0]
            compact = {**call, "function": {"name": "look", "arguments": '{"path":"a/b"}'}}
            shown = {"role": "assistant", "content": parts("I look."), "tool_calls": [compact]}
            history = [{**USER, "content": parts("Do it.")}, shown, result(call, parts("found"))]
            second = await said(s, history)
            history += [second, {"role": "user", "content": parts("And?")}]
            await said(s, history)
            (one, two, three), selection = await ended(s)
            assert_appends(one, two)
            assert_appends(two, three)
            assert selection.kept == (0, 1, 2)

    asyncio.run(run())


# ---- opencode -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [BROKEN, call_text("no_such_tool", {"x": 1})])
def test_opencode_rewrites_a_bad_call_to_a_tool_called_invalid(sampled: str) -> None:
    async def run() -> None:
        async with stage(sampled, "Done.") as s:
            first = await said(s, [USER])
            call = first["tool_calls"][0]
            told = {"tool": call["function"]["name"], "error": "cannot be read"}
            invalid = {"name": "invalid", "arguments": json.dumps(told)}
            shown = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call, "function": invalid}],
            }
            await said(s, [USER, shown, result(call, "The arguments are invalid.")])
            (one, two), selection = await ended(s)
            assert_appends(one, two)
            assert "invalid" not in tiny_codec().decode(two.prompt_ids[: -two.encoded_tok])
            assert selection.kept == (0, 1)

    asyncio.run(run())


# ---- pi -------------------------------------------------------------------------------------


def test_pi_repairs_broken_arguments_and_runs_them() -> None:
    async def run() -> None:
        async with stage(BROKEN, "Done.") as s:
            first = await said(s, [USER], max_completion_tokens=32000, reasoning_effort="medium")
            call = first["tool_calls"][0]
            assert call["function"]["arguments"] == '{"path": "a/b'  # as it was sampled
            repaired = {**call, "function": {"name": "look", "arguments": '{"path":"a/b"}'}}
            await said(s, [USER, {**first, "tool_calls": [repaired]}, result(call)])
            (one, two), selection = await ended(s)
            assert_appends(one, two)
            assert selection.kept == (0, 1)

    asyncio.run(run())


# ---- mini-swe-agent -------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", ["I think I am done.", BROKEN])
def test_mini_swe_drops_a_turn_without_a_good_call(dropped: str) -> None:
    async def run() -> None:
        async with stage(LOOKED, dropped, LOOKED, "Done.") as s:
            first = await said(s, [USER])
            history = [USER, first, result(first["tool_calls"][0])]
            await said(s, history)
            history.append({"role": "user", "content": "Tool call error: expected one call."})
            third = await said(s, history)
            await said(s, [*history, third, result(third["tool_calls"][0])])
            (one, lost, after, last), selection = await ended(s)
            assert_appends(one, lost)
            assert after.breaks == ("dropped turn",) and after.continues == (one.call_id,)
            kept = lost.prompt_tok - TURN_OPENING_TOK
            assert np.array_equal(after.prompt_ids[:kept], lost.prompt_ids[:kept])
            assert_appends(after, last)
            assert selection.dropped == {1: DEAD_LEAF} and selection.kept == (0, 2, 3)

    asyncio.run(run())


# ---- nanobot --------------------------------------------------------------------------------


def test_nanobots_sampling_is_recorded_and_overridden() -> None:
    async def run() -> None:
        async with stage(LOOKED, "Done.", sampling=SamplingParams(temperature=0.7)) as s:
            more = {"temperature": 0.1, "max_tokens": 8192, "tools": [LOOK]}
            headers = {"x-session-affinity": "abc"}
            response = await s.chat([USER], headers, **more)
            first = response.json()["choices"][0]["message"]
            await s.chat([USER, first, result(first["tool_calls"][0])], headers, **more)
            (one, two), selection = await ended(s)
            assert_appends(one, two)
            for call in (one, two):
                assert call.requested == {"temperature": 0.1, "max_tokens": 8192}
                assert call.effective.temperature == 0.7 and call.effective.max_tok == 64
            assert selection.kept == (0, 1)

    asyncio.run(run())


# ---- retries --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_counted_retry_gets_the_sample_that_is_being_made(count: str) -> None:
    """The openai client repeats a request while the server still works on the first one."""

    async def run() -> None:
        async with stage(LOOKED, "unused", gated=True) as s:
            assert s.engine.gate is not None
            first = asyncio.ensure_future(s.chat([USER], tools=[LOOK]))
            await until(lambda: len(s.engine.asked) == 1)
            header = {"x-stainless-retry-count": count}
            again = asyncio.ensure_future(s.chat([USER], header, tools=[LOOK]))
            await asyncio.sleep(0.02)
            s.engine.gate.set()
            one, two = await asyncio.gather(first, again)
            assert one.json()["choices"] == two.json()["choices"]
            (call,), _ = await ended(s)
            assert call.delivery is Delivery.DELIVERED and len(s.engine.asked) == 1

    asyncio.run(run())


def test_the_same_body_without_a_count_is_another_sample() -> None:
    """Two agents may well ask the same at the same time."""

    async def run() -> None:
        async with stage("one", "two", gated=True) as s:
            assert s.engine.gate is not None
            first = asyncio.ensure_future(s.chat([USER]))
            await until(lambda: len(s.engine.asked) == 1)
            second = asyncio.ensure_future(s.chat([USER]))
            await until(lambda: len(s.engine.asked) == 2)
            s.engine.gate.set()
            answers = await asyncio.gather(first, second)
            texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
            assert texts == {"one", "two"}
            calls, selection = await ended(s)
            assert [call.attempt for call in calls] == [0, 1]
            assert np.array_equal(calls[0].prompt_ids, calls[1].prompt_ids)
            assert selection.dropped == {0: DEAD_LEAF} and selection.kept == (1,)

    asyncio.run(run())

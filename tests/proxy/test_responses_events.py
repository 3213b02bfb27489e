"""Fault A12: the events of a Responses stream, one by one."""

from __future__ import annotations

import asyncio
from typing import Any

from clawgym_jax.core.errors import Overloaded, Overlong
from clawgym_jax.core.types import Delivery, Finish
from clawgym_jax.proxy import ProxyConfig
from tests.proxy.sse import events_of
from tests.proxy.support import FAST, LOOK, Say, Stage, call_text, completion, stage, tiny_codec

FUNCTION: Any = {"type": "function", **LOOK["function"]}  # type: ignore[dict-item]
PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes a file."}
SAID = "<think>\nhm\n</think>\n\nI look.\n" + call_text("look", {"path": "ä"})


async def ask(s: Stage, **more: Any) -> Any:
    body = {"model": "policy-x", "input": "Do it.", "stream": True, **more}
    url = f"{s.endpoint.base_url}/v1/responses"
    return await s.http.post(url, json=body, headers=s.auth)


def stream_of(*script: Say, config: ProxyConfig = FAST, **more: Any) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        async with stage(*script, config=config) as s:
            response = await ask(s, **more)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_of(response.content)

    events = asyncio.run(run())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


REASONING = [
    "output_item.added",
    "reasoning_summary_part.added",
    "reasoning_summary_text.delta",
    "reasoning_summary_text.done",
    "reasoning_summary_part.done",
    "output_item.done",
]
MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


def test_reasoning_text_and_a_call() -> None:
    events = stream_of(SAID, tools=[FUNCTION])
    body = [*REASONING, *MESSAGE, *CALL]
    assert kinds(events) == ["created", "in_progress", *body, "completed"]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["model"], last["error"]) == ("completed", "policy-x", None)
    assert events[0]["response"] == events[1]["response"]
    assert first["id"] == last["id"] and first["created_at"] == last["created_at"]
    added = [e for e in events if e["type"].endswith("output_item.added")]
    done = [e["item"] for e in events if e["type"].endswith("output_item.done")]
    assert [e["item"]["status"] for e in added] == ["in_progress"] * 3
    assert [e["output_index"] for e in added] == [0, 1, 2]
    assert done == last["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert [item["status"] for item in done] == ["completed"] * 3
    assert {item["id"] for item in done} == {e["item_id"] for e in events if "item_id" in e}


def test_contents_of_the_events() -> None:
    events = {kind: e for kind, e in zip(*both(stream_of(SAID, tools=[FUNCTION])), strict=True)}
    assert events["reasoning_summary_text.delta"]["delta"] == "hm"
    assert events["reasoning_summary_part.done"]["part"] == {"type": "summary_text", "text": "hm"}
    assert events["reasoning_summary_text.done"]["summary_index"] == 0
    assert events["content_part.added"]["part"]["text"] == ""
    assert events["output_text.delta"]["delta"] == events["output_text.done"]["text"] == "I look."
    assert events["content_part.done"]["content_index"] == 0
    assert events["function_call_arguments.delta"]["delta"] == '{"path": "ä"}'
    assert events["function_call_arguments.done"]["arguments"] == '{"path": "ä"}'
    assert events["function_call_arguments.done"]["name"] == "look"


def both(events: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    return kinds(events), events


def test_a_freeform_call() -> None:
    said = call_text("patch", {"input": "*** Begin\n+x"})
    events = stream_of(said, tools=[PATCH])
    body = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert kinds(events) == ["created", "in_progress", *body, "output_item.done", "completed"]
    assert events[3]["delta"] == events[4]["input"] == "*** Begin\n+x"
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "custom_tool_call" and item["input"] == "*** Begin\n+x"
    assert item["call_id"].isalnum() and item["name"] == "patch"


def test_a_search_for_tools_has_no_deltas() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
    events = stream_of(call_text("tool_search", {"query": "x"}), tools=[search])
    body = ["output_item.added", "output_item.done"]
    assert kinds(events) == ["created", "in_progress", *body, "completed"]
    assert events[2]["item"]["arguments"] == events[3]["item"]["arguments"] == {"query": "x"}


def test_an_incomplete_turn() -> None:
    ids = tiny_codec().encode_rendered("<think>\nhm\n</think>\n\nI lo").tolist()
    events = stream_of(completion(ids, Finish.LENGTH), max_output_tokens=len(ids))
    assert kinds(events) == ["created", "in_progress", *REASONING, *MESSAGE, "incomplete"]
    last = events[-1]["response"]
    assert last["status"] == "incomplete"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["output"]] == ["completed", "incomplete"]
    assert last["usage"]["output_tokens"] == len(ids)
    close = tiny_codec().token_id("</think>")
    reasoning = last["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == ids.index(close) + 1
    assert last["max_output_tokens"] == len(ids)


def test_a_turn_without_any_output() -> None:
    events = stream_of("")
    assert kinds(events) == ["created", "in_progress", "completed"]
    assert events[-1]["response"]["output"] == []


def test_a_failed_turn() -> None:
    away = ProxyConfig(engine_wait_s=0.0, settle_interval_s=0.002)
    events = stream_of(Overloaded("full"), config=away)
    assert kinds(events) == ["created", "in_progress", "failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "overloaded"
    assert response["id"] == events[0]["response"]["id"]


def test_a_prompt_that_the_engine_finds_too_long_fails_by_its_name() -> None:
    events = stream_of(Overlong(9, 8))
    assert kinds(events) == ["created", "in_progress", "failed"]
    error = events[-1]["response"]["error"]
    assert error["code"] == "context_length_exceeded" and "9 tokens > 8" in error["message"]


def test_signs_of_life_are_comments_and_an_abort_ends_the_stream() -> None:
    async def run() -> None:
        async with stage("late", gated=True) as s:
            asking = asyncio.create_task(ask(s))
            while not s.engine.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(3 * FAST.keepalive_s)
            s.engine.cancel(s.engine.asked[0].request_id)
            response = await asking
            assert response.content.count(b": keep-alive\n\n") >= 1
            events = events_of(response.content)
            assert kinds(events) == ["created", "in_progress", *MESSAGE, "incomplete"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            (call,) = (await s.proxy.close_episode("ep")).calls
            assert call.completion.finish is Finish.ABORT and call.delivery is Delivery.DELIVERED

    asyncio.run(run())

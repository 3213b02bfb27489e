"""A streamed answer accumulates to the answer that is not streamed, in all protocols.

The vendors' clients accumulate, over a transport that hands them what a protocol writes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.openai_responses import OpenAIResponses
from clawgym_jax.proxy.protocol import WireProtocol, dump
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, Turn
from tests.proxy.sse import events_of
from tests.proxy.test_tool_calls import objects

LINE_ENDS = "\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
texts = st.text(st.characters(codec="utf-8") | st.sampled_from(LINE_ENDS), max_size=40)
names = st.sampled_from(["look", "patch", "agents__spawn"])
arguments = objects.map(lambda value: json.dumps(value, ensure_ascii=False))
whole_calls = st.tuples(names, arguments)
raw_calls = st.tuples(names, st.sampled_from(["{", "[1]", '{"path": }', "words"]))


@st.composite
def answers(draw: st.DrawFn, calls: st.SearchStrategy[tuple[str, str]]) -> Answer:
    said = draw(st.lists(calls, max_size=3))
    turn = Turn(
        "assistant",
        draw(texts),
        tuple(ToolCall(f"call{index}", *call) for index, call in enumerate(said)),
        thinking=draw(texts),
    )
    finish = draw(st.sampled_from(["tool"] if said else ["stop", "length", "stop_string"]))
    prompt_tok = draw(st.integers(1, 10**6))
    return Answer(
        call_id=draw(st.sampled_from(["ep.0", "ep.1"])),
        turn=turn,
        finish=finish,
        stop_string="END" if finish == "stop_string" else None,
        prompt_tok=prompt_tok,
        completion_tok=draw(st.integers(1, 10**4)),
        cached_tok=draw(st.integers(0, prompt_tok)),
        reasoning_tok=draw(st.integers(0, 9)),
        created_s=1,
    )


LOOK = {"type": "function", "name": "look"}
PATCH = {"type": "custom", "name": "patch"}
SPACE = {"type": "namespace", "name": "agents", "tools": [{"name": "spawn"}]}
ASK = {"role": "user", "content": "x"}
TOOLS: Mapping[str, Any] = {
    "openai-chat": [
        {"type": "function", "function": {"name": "look"}},
        {"type": "function", "function": {"name": "agents__spawn"}},
        {"type": "function", "function": {"name": "patch"}},
    ],
    "openai-responses": [LOOK, PATCH, SPACE],
    "anthropic": [{"name": "look"}, {"name": "patch"}, {"name": "agents__spawn"}],
}


def request_of(protocol: WireProtocol, stream: bool, **more: Any) -> Request:
    asked = {"model": "m", "stream": stream, "tools": TOOLS[protocol.name], **more}
    thinking = {"thinking": {"type": "adaptive"}, "stream_options": {"include_usage": True}}
    return protocol.parse({**asked, **thinking, "messages": [ASK], "input": [ASK]}, {})


def written(protocol: WireProtocol, request: Request, answer: Answer) -> bytes:
    start = protocol.stream_start(request, answer.call_id, answer.prompt_tok)
    return start + protocol.keepalive + b"".join(protocol.stream_events(request, answer))


def http_client(vendor: Any, protocol: WireProtocol, answer: Answer) -> Any:
    """A client of the HTTP library that the vendor builds on, whose server has just this answer."""
    base = vendor.DefaultHttpxClient.__mro__[1]
    library = importlib.import_module(base.__module__.partition(".")[0])

    def handle(http: Any) -> Any:
        stream = bool(json.loads(http.content).get("stream"))
        request = request_of(protocol, stream)
        if stream:
            body, kind = written(protocol, request, answer), "text/event-stream"
        else:
            body, kind = dump(protocol.message(request, answer)), "application/json"
        return library.Response(200, content=body, headers={"content-type": kind})

    return library.Client(transport=library.MockTransport(handle))


@given(answers(whole_calls))
@settings(max_examples=40)
def test_anthropic(answer: Answer) -> None:
    http = http_client(anthropic, AnthropicMessages(), answer)
    with anthropic.Anthropic(base_url="http://x", api_key="k", http_client=http) as client:
        common: Any = {"model": "m", "max_tokens": 9, "messages": [ASK]}
        whole = client.messages.create(**common)
        with client.messages.stream(**common) as events:
            streamed = events.get_final_message()
    assert plain(streamed) == plain(whole)
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == answer.prompt_tok


@given(answers(whole_calls | raw_calls))
@settings(max_examples=40)
def test_openai_chat(answer: Answer) -> None:
    http = http_client(openai, OpenAIChat(), answer)
    with openai.OpenAI(base_url="http://x", api_key="k", http_client=http) as client:
        common: Any = {"model": "m", "messages": [ASK]}
        whole = plain(client.chat.completions.create(**common))
        with client.chat.completions.stream(**common) as events:
            for _ in events:
                pass
            streamed = plain(events.current_completion_snapshot)
    for completion in (whole, streamed):
        completion.pop("object")
        message = completion["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    assert streamed == whole


@given(answers(whole_calls | raw_calls))
@settings(max_examples=40)
def test_openai_responses(answer: Answer) -> None:
    http = http_client(openai, OpenAIResponses(), answer)
    with openai.OpenAI(base_url="http://x", api_key="k", http_client=http) as client:
        common: Any = {"model": "m", "input": "x"}
        whole = plain(client.responses.create(**common))
        events = list(client.responses.create(**common, stream=True))
    streamed = plain(events[-1].response)  # type: ignore[union-attr]
    done = [plain(e.item) for e in events if e.type == "response.output_item.done"]
    for response in (whole, streamed):
        response.pop("created_at")
    assert streamed == whole and done == whole["output"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert deltas_of(events) == contents_of(whole["output"])


def plain(model: Any) -> dict[str, Any]:
    value: dict[str, Any] = model.model_dump(exclude_none=True, warnings=False)
    return value


def deltas_of(events: list[Any]) -> dict[str, str]:
    """What a client that reads deltas only collects for each item."""
    collected: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            collected[event.item_id] = collected.get(event.item_id, "") + event.delta
    return collected


def contents_of(items: list[dict[str, Any]]) -> dict[str, str]:
    found = {}
    for item in items:
        if item["type"] == "reasoning":
            found[item["id"]] = item["summary"][0]["text"]
        elif item["type"] == "message":
            found[item["id"]] = item["content"][0]["text"]
        else:
            found[item["id"]] = item.get("arguments", item.get("input"))
    return found


@pytest.mark.parametrize("protocol", [AnthropicMessages(), OpenAIChat(), OpenAIResponses()])
@given(answer=answers(whole_calls | raw_calls))
def test_readers_that_split_lines_at_any_line_end(protocol: WireProtocol, answer: Answer) -> None:
    """Python's own splitlines and httpx know more line ends than the specification."""
    raw = written(protocol, request_of(protocol, True), answer)
    response = httpx.Response(200, content=raw)
    data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert [json.loads(text) for text in data if text != "[DONE]"] == events_of(raw)


def test_anthropic_carries_raw_calls_in_a_stream_and_as_text_in_a_whole_message() -> None:
    calls = (ToolCall("a", "look", '{"path": }'), ToolCall("b", "look", '{"path": "x"}'))
    protocol = AnthropicMessages()
    for turn, stop in ((Turn("assistant", "So.", calls), "tool_use"),
                       (Turn("assistant", "So.", calls[:1]), "end_turn")):  # fmt: skip
        answer = Answer("ep.0", turn, "tool", None, 5, 4, 0)
        request = request_of(protocol, True)
        events = events_of(b"".join(protocol.stream_events(request, answer)))
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [(b.get("id"), b.get("input")) for b in starts[1:]] == [
            (call.id, {}) for call in turn.calls
        ]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert deltas[1] == {"type": "input_json_delta", "partial_json": '{"path": }'}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        whole = protocol.message(request_of(protocol, False), answer)
        assert whole["stop_reason"] == stop
        assert '{"path": }' in whole["content"][0]["text"]
        assert [b["id"] for b in whole["content"][1:]] == [c.id for c in turn.calls[1:]]

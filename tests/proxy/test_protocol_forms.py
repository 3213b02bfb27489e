"""Forms that harnesses send in the Anthropic and Chat protocols, and what the model sees."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.faults import RequestFault
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.openai_responses import OpenAIResponses
from clawgym_jax.proxy.protocol import WireProtocol
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, Turn
from tests.proxy.sse import events_of
from tests.proxy.support import LOOK, LOOK_ANTHROPIC, call_text, completion, stage, tiny_codec

USER = {"role": "user", "content": "Do it."}
ASK = Turn("user", "Do it.")
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"path": }}\n</tool_call>'


def chat(*messages: Any, **more: Any) -> Request:
    return OpenAIChat().parse({"model": "m", "messages": list(messages), **more}, {})


def claude(*messages: Any, **more: Any) -> Request:
    return AnthropicMessages().parse({"model": "m", "messages": list(messages), **more}, {})


# ---- roles and contents -----------------------------------------------------------------------


@pytest.mark.parametrize("ask", [chat, claude])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_anywhere(ask: Any, role: str) -> None:
    for content in ("Mind.", [{"type": "text", "text": "Mind."}]):
        said = {"role": role, "content": content}
        mind = Turn("system", "Mind.")
        assert ask(said, USER, said, USER, said).turns == (mind, ASK, mind, ASK, mind)


@pytest.mark.parametrize("ask", [chat, claude])
def test_a_text_and_a_list_of_texts_are_the_same(ask: Any) -> None:
    listed = {"role": "user", "content": [{"type": "text", "text": "Do it."}]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "ok"}]}
    assert ask(listed, said).turns == ask(USER, {**said, "content": "ok"}).turns


def test_anthropic_tool_results_between_texts() -> None:
    uses = [{"type": "tool_use", "id": i, "name": "look", "input": {"n": i}} for i in ("a", "b")]
    results = [
        {"type": "text", "text": "first"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "B"}]},
        {"type": "tool_result", "tool_use_id": "a", "content": "A", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "then"},
        {"type": "text", "text": "more"},
    ]
    thought = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    request = claude(
        USER,
        {"role": "assistant", "content": [*thought, *uses]},
        {"role": "user", "content": results},
    )
    calls = tuple(ToolCall(i, "look", f'{{"n": "{i}"}}') for i in ("a", "b"))
    assert request.turns[1:] == (
        Turn("assistant", "", calls, "", "hm"),
        Turn("user", "first"),
        Turn("tool", "B", tool_call_id="b"),
        Turn("tool", "A", tool_call_id="a"),
        Turn("tool", "", tool_call_id="c"),
        Turn("user", "then\nmore"),
    )


def test_chat_reasoning_under_its_names_and_in_the_text() -> None:
    said: list[dict[str, Any]] = [
        {"content": "ok", "reasoning_content": "hm"},
        {"content": "ok", "reasoning": "hm"},
        {"content": "<think>\nhm\n</think>\n\nok"},
    ]
    for message in said:
        turn = chat(USER, {"role": "assistant", **message}).turns[1]
        assert (turn.text.strip(), turn.thinking) == ("ok", "hm")
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    assert chat(USER, refusal).turns[1].text == "No."


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
PAGE = {"type": "document", "source": {"type": "text", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
UNREADABLE: list[tuple[Any, dict[str, Any]]] = [
    (chat, {"role": "user", "content": [IMAGE_URL]}),
    (chat, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
    (chat, {"role": "user", "content": [{"type": "file", "file": {}}]}),
    (chat, {"role": "tool", "tool_call_id": "a", "content": [IMAGE_URL]}),
    (claude, {"role": "user", "content": [IMAGE]}),
    (claude, {"role": "user", "content": [PAGE]}),
    (claude, {"role": "user", "content": [RESULT]}),
    (claude, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]}),
]


@pytest.mark.parametrize(("ask", "message"), UNREADABLE)
def test_what_the_model_cannot_read_is_refused(ask: Any, message: dict[str, Any]) -> None:
    with pytest.raises(RequestFault, match="leave out images, audio and files"):
        ask(USER, message)


ODD: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"stream": "yes"}, '"stream" to be true or false'),
    (chat, {"tools": {"a": 1}}, '"tools" to be a list'),
    (chat, {"tools": [{"type": "custom", "custom": {}}]}, "a custom tool with a name"),
    (chat, {"model": ["m"]}, '"model" to be a string'),
    (chat, {"n": 2}, '"n" to be 1'),
    (chat, {"modalities": ["text", "audio"]}, '"modalities"'),
    (chat, {"functions": [{"name": "look"}]}, '"tools" instead of'),
    (chat, {"max_tokens": True}, "positive integer"),
    (chat, {"stop": [1]}, "list of strings"),
    (claude, {"tools": [{"description": "x"}]}, "a tool with a name"),
    (claude, {"tools": [{"name": "x", "input_schema": []}, {"name": "y", "input_schema": [1]}]},
     "input_schema"),
    (claude, {"system": 3}, '"system" to be a string or a list'),
    (claude, {"max_tokens": 1.5}, "positive integer"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "change", "words"), ODD)
def test_odd_fields_are_refused_in_clear_words(
    ask: Any, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestFault, match=r"expected .*, got ") as refused:
        ask(USER, **change)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("protocol", "choice"),
    [
        (AnthropicMessages(), {"type": "any", "disable_parallel_tool_use": True}),
        (OpenAIChat(), "required"),
        (OpenAIResponses(), {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ],
)
def test_tool_choice_is_recorded(protocol: WireProtocol, choice: Any) -> None:
    body = {"messages": [USER], "input": [USER], "tool_choice": choice}
    assert protocol.parse(body, {}).requested["tool_choice"] == choice


def test_anthropic_tools_of_the_maker_are_left_out_by_name() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, LOOK_ANTHROPIC]
    request = claude(USER, tools=[*tools, {**LOOK_ANTHROPIC, "type": "custom", "name": "other"}])
    assert request.tool_names == ("look", "other")
    assert request.requested["tools_left_out"] == ["web_search_20250305"]


def test_deferred_tools_are_told_where_they_are_found() -> None:
    """Claude Code's ToolSearch: a found tool joins the request's tools, in alphabetical order."""
    found = {**LOOK_ANTHROPIC, "name": "find", "defer_loading": True}
    holder = {**LOOK_ANTHROPIC, "name": "placeholder", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "find"}

    async def run() -> None:
        async with stage(call_text("look", {}), "done") as s:
            tools = [LOOK_ANTHROPIC, holder]
            content = (await s.messages([USER], tools=tools)).json()["content"]
            result = {
                "type": "tool_result",
                "tool_use_id": content[0]["id"],
                "content": [reference],
            }
            history = [USER, {"role": "assistant", "content": content}]
            history.append({"role": "user", "content": [result]})
            await s.messages(history, tools=[found, *tools])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one) and two.breaks == ()
            assert "placeholder" not in tiny_codec().decode(one.prompt_ids)
            told = tiny_codec().decode(two.prompt_ids[one.prompt_tok :])
            assert '"name": "find"' in told and '"path"' in told

    asyncio.run(run())


def test_deferred_tools_are_shown_at_once_where_the_maker_would_search() -> None:
    deferred = {**LOOK_ANTHROPIC, "defer_loading": True}
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert claude(USER, tools=[deferred]).tool_names == ()
    assert claude(USER, tools=[deferred, search]).tool_names == ("look",)
    unknown = {"type": "tool_reference", "tool_name": "gone"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [unknown]}
    assert claude(USER, {"role": "user", "content": [result]}).turns[1].text == "gone"


# ---- freeform tools in Chat -------------------------------------------------------------------

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
PATCH = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Changes.", "format": GRAMMAR},
}


@pytest.mark.parametrize("stream", [True, False])
def test_chat_freeform_calls_and_back(stream: bool) -> None:
    async def run() -> None:
        said = call_text("patch", {"input": "+x"}) + call_text("look", {})
        async with stage(said, "done") as s:
            response = await s.chat([USER], tools=[PATCH, LOOK], stream=stream)
            message = accumulated(response.content) if stream else whole(response)
            custom, function = message["tool_calls"]
            assert custom["custom"] == {"name": "patch", "input": "+x"}
            assert (custom["type"], function["type"]) == ("custom", "function")
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
                for call in (function, custom)
            ]
            await s.chat([USER, message, *results], tools=[PATCH, LOOK])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one) and two.breaks == ()
            shown = tiny_codec().decode(one.prompt_ids)
            assert "Changes." in shown and "start:" in shown

    asyncio.run(run())


def whole(response: Any) -> dict[str, Any]:
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def accumulated(raw: bytes) -> dict[str, Any]:
    """Deltas added up as the OpenAI clients do it: texts are joined, the rest is set."""
    message: dict[str, Any] = {"tool_calls": []}
    for event in events_of(raw):
        for choice in event["choices"]:
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
                    continue
                known = message["tool_calls"][call["index"]]
                for kind in ("function", "custom"):
                    for name, text in call.get(kind, {}).items():
                        known[kind][name] += text
            for name, text in delta.items():
                message[name] = (message.get(name) or "") + text if text else message.get(name)
    return message


# ---- broken calls in histories ----------------------------------------------------------------


def test_claude_code_wraps_input_that_it_cannot_read() -> None:
    async def run() -> None:
        async with stage("So.\n" + BROKEN, "done") as s:
            response = await s.messages([USER], tools=[LOOK_ANTHROPIC], stream=True)
            events = events_of(response.content)
            (use,) = [
                e["content_block"]
                for e in events
                if e["type"] == "content_block_start" and e["content_block"]["type"] == "tool_use"
            ]
            raw = '{"path": }'
            wrapped = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
            history = [
                USER,
                {"role": "assistant", "content": [
                    {"type": "text", "text": "So."}, {**use, "input": wrapped}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": use["id"], "content": "x",
                     "is_error": True}]},
            ]  # fmt: skip
            await s.messages(history, tools=[LOOK_ANTHROPIC])
            trace = await s.proxy.close_episode("ep")
            assert extends(trace.calls[1].prompt_ids, trace.calls[0])
            assert trace.causes == {"malformed tool call": 1}

    asyncio.run(run())


def test_opencode_renames_a_broken_call() -> None:
    async def run() -> None:
        async with stage(BROKEN, "done") as s:
            response = await s.chat([USER], tools=[LOOK], stream=True)
            message = accumulated(response.content)
            (call,) = message["tool_calls"]
            assert call["function"]["arguments"] == '{"path": }'
            told = json.dumps({"tool": "look", "error": "no JSON"})
            call["function"] = {"name": "invalid", "arguments": told}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
            await s.chat([USER, {**message, "content": ""}, result], tools=[LOOK])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one) and two.breaks == ()

    asyncio.run(run())


# ---- usage and counts -------------------------------------------------------------------------


def test_cached_tokens_in_every_protocol() -> None:
    codec = tiny_codec()
    ids = codec.encode_rendered("ok" + codec.end_of_turn).tolist()
    said = dataclasses.replace(completion(ids), cached_tok=3)

    async def run() -> None:
        async with stage(*[said] * 4) as s:
            whole_usage = (await s.messages([USER])).json()["usage"]
            events = events_of((await s.messages([USER], stream=True)).content)
            size = s.engine.asked[0].prompt_ids.size
            assert whole_usage["input_tokens"] == size - 3
            assert whole_usage["cache_read_input_tokens"] == 3
            assert whole_usage["output_tokens"] == len(ids)
            assert events[0]["message"]["usage"]["input_tokens"] == size
            assert events[-2]["usage"] == whole_usage
            usage = (await s.chat([USER])).json()["usage"]
            assert usage["prompt_tokens"] == size
            assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
            body = {"model": "m", "input": "Do it."}
            url = f"{s.endpoint.base_url}/v1/responses"
            usage = (await s.http.post(url, json=body, headers=s.auth)).json()["usage"]
            assert usage["input_tokens"] == size
            assert usage["input_tokens_details"] == {"cached_tokens": 3}

    asyncio.run(run())


def test_chat_usage_in_a_stream_only_where_asked_for() -> None:
    async def run() -> None:
        async with stage("a", "b") as s:
            plain = events_of((await s.chat([USER], stream=True)).content)
            assert all("usage" not in event for event in plain)
            options = {"include_usage": True}
            response = await s.chat([USER], stream=True, stream_options=options)
            *_, last = events_of(response.content)
            assert last["choices"] == []
            assert last["usage"]["prompt_tokens"] == s.engine.asked[1].prompt_ids.size
            assert response.content.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_counted_tokens_are_those_that_would_be_fed() -> None:
    async def run() -> None:
        async with stage("<think>\nhm\n</think>\n\nok", "done") as s:
            common: dict[str, Any] = {"system": "Act.", "tools": [LOOK_ANTHROPIC]}
            content = (await s.messages([USER], **common)).json()["content"]
            history = [USER, {"role": "assistant", "content": content}, USER]
            url = f"{s.endpoint.base_url}/v1/messages/count_tokens"
            body = {"model": "m", "messages": history, **common}
            counted = (await s.http.post(url, json=body, headers=s.auth)).json()
            await s.messages(history, **common)
            assert counted == {"input_tokens": s.engine.asked[1].prompt_ids.size}
            assert len((await s.proxy.close_episode("ep")).calls) == 2

    asyncio.run(run())


def test_an_answer_shows_no_thinking_that_was_not_asked_for() -> None:
    answer = Answer("ep.0", Turn("assistant", "ok", (), "", "hm"), "stop", None, 1, 1, 0)
    for thinking, shown in (({"type": "adaptive"}, 2), ({"type": "disabled"}, 1), (None, 1)):
        message = AnthropicMessages().message(claude(USER, thinking=thinking), answer)
        assert len(message["content"]) == shown

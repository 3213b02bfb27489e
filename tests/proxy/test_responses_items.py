"""Input items and tools of the Responses API: what the model sees of them, and the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clawgym_jax.proxy.faults import RequestFault
from clawgym_jax.proxy.openai_responses import OpenAIResponses
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, Turn

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]}
ASK = Turn("user", "Do it.")


def parse(items: Any, **more: Any) -> Request:
    return OpenAIResponses().parse({"model": "m", "input": items, **more}, {})


def answer(request: Request, turn: Turn) -> list[dict[str, Any]]:
    said = Answer("run/ep.0", turn, "tool" if turn.calls else "stop", None, 9, 5, 2)
    output: list[dict[str, Any]] = OpenAIResponses().message(request, said)["output"]
    return output


def test_texts_in_every_form() -> None:
    assert parse("Do it.").turns == (ASK,)
    assert parse([{"role": "user", "content": "Do it."}]).turns == (ASK,)
    assert parse([USER], instructions="Act.").turns == (Turn("system", "Act."), ASK)
    for role in ("system", "developer"):
        items = [USER, {"role": role, "content": [{"type": "input_text", "text": "Mind."}]}, USER]
        assert parse(items).turns == (ASK, Turn("system", "Mind."), ASK)
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert parse([USER, refused]).turns == (ASK, Turn("assistant", "No."))


def test_items_of_one_turn_are_one_turn() -> None:
    """Two sampled turns, the first with two calls, their outputs in the order of completion."""
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"type": "function_call_output", "call_id": "c1",
         "output": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "more"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}], "summary": []},
        {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "c3", "output": "no"},
    ]  # fmt: skip
    calls = (ToolCall("c1", "look", "{}"), ToolCall("c2", "read", '{"a": 1}'))
    assert parse(items).turns == (
        ASK,
        Turn("assistant", "I look.", calls, "", "hm"),
        Turn("tool", "two", tool_call_id="c2"),
        Turn("tool", "one\nmore", tool_call_id="c1"),
        Turn("assistant", "", (ToolCall("c3", "look", "{broken"),), "", "so"),
        Turn("tool", "no", tool_call_id="c3"),
    )


def test_turns_that_follow_each_other_stay_apart() -> None:
    said = {"role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert [turn.text for turn in parse([USER, said, said]).turns] == ["Do it.", "a", "a"]
    turns = parse([USER, thought, said, thought, said]).turns
    assert [turn.thinking for turn in turns] == ["", "hm", "hm"]
    assert len(parse([USER, {"type": "reasoning", "summary": []}, USER]).turns) == 2


@pytest.mark.parametrize("kept", ["summary", "encrypted_content", "content"])
def test_reasoning_comes_back_from_whatever_a_harness_keeps(kept: str) -> None:
    request = parse("Do it.", include=["reasoning.encrypted_content"])
    thinking = "hm\nä <think> 🙂"
    item = answer(request, Turn("assistant", "done", (), "", thinking))[0]
    if kept == "content":
        item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thinking}]}
    else:
        item = {"type": "reasoning", "summary": [], kept: item[kept]}
    assert parse([USER, item, {"role": "assistant", "content": "done"}]).turns[1] == Turn(
        "assistant", "done", (), "", thinking
    )


def test_sealed_reasoning_of_others_is_left_out_and_a_damaged_seal_is_an_error() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}
    assert parse([USER, foreign, USER]).turns == (ASK, ASK)
    with pytest.raises(RequestFault, match="as it was sent"):
        parse([USER, {**foreign, "encrypted_content": "thought.*"}])


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'}
PATCH = {"type": "custom", "name": "patch", "description": "Changes.", "format": GRAMMAR}


def test_freeform_tools() -> None:
    request = parse("Do it.", tools=[PATCH])
    (tool,) = request.tools
    assert tool["function"]["name"] == "patch"
    assert "Changes." in tool["function"]["description"]
    assert 'start: "*** Begin"' in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    sampled = ToolCall("c1", "patch", '{"input": "a\\n\\"b"}')
    (item,) = answer(request, Turn("assistant", "", (sampled,)))
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'a\n"b')
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    _, again, result = parse([USER, item, output], tools=[PATCH]).turns
    assert json.loads(again.calls[0].arguments) == json.loads(sampled.arguments)
    assert (again.calls[0].name, again.calls[0].id) == ("patch", "c1")
    assert result == Turn("tool", "ok", tool_call_id="c1")


@pytest.mark.parametrize("arguments", ["*** Begin", '{"patch": "x"}', '{"input": 3}', "{"])
def test_a_freeform_call_of_another_shape_goes_out_as_it_is(arguments: str) -> None:
    request = parse("Do it.", tools=[PATCH])
    (item,) = answer(request, Turn("assistant", "", (ToolCall("c1", "patch", arguments),)))
    assert item["input"] == arguments


SPAWN = {"type": "function", "name": "spawn", "description": "Starts.", "parameters": {}}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Others to work with.",
    "tools": [SPAWN, {"type": "custom", "name": "tell"}, {"type": "function", "name": "spawn2"}],
}


def test_namespaced_tools() -> None:
    clash = {"type": "function", "name": "agents__spawn"}
    request = parse("Do it.", tools=[SPACE, clash, {**SPAWN}])
    names = ["agents__spawn", "spawn", "agents__spawn_2", "agents__tell", "agents__spawn2"]
    assert list(request.tool_names) == names
    shown = request.tools[2]["function"]["description"]
    assert shown == "agents: Others to work with.\n\nStarts."
    calls = tuple(ToolCall(f"c{i}", name, '{"input": "x"}') for i, name in enumerate(names))
    items = answer(request, Turn("assistant", "", calls))
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        (None, "agents__spawn"),
        (None, "spawn"),
        ("agents", "spawn"),
        ("agents", "tell"),
        ("agents", "spawn2"),
    ]
    assert items[3]["type"] == "custom_tool_call" and items[3]["input"] == "x"
    turn = parse([USER, *items], tools=[SPACE, clash, SPAWN]).turns[1]
    assert [call.name for call in turn.calls] == names
    later = parse([USER, *items]).turns[1]  # such as a compaction, which brings no tools
    assert [call.name for call in later.calls][3:] == names[3:]
    dunder = parse("Do it.", tools=[{**SPACE, "name": "mcp__x__"}])
    assert dunder.tool_names[0] == "mcp__x__spawn"


SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def test_a_search_for_tools_that_the_client_does() -> None:
    request = parse("Do it.", tools=[SEARCH, SPAWN])
    assert request.tool_names == ("tool_search", "spawn")
    sampled = ToolCall("c1", "tool_search", '{"query": "agents"}')
    (item,) = answer(request, Turn("assistant", "", (sampled,)))
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "agents"}
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [SPACE]}
    history = [USER, item, found]
    for more in ([SEARCH, SPAWN], []):  # a compaction brings no tools
        later = parse(history, tools=more)
        assert len(later.tools) == len(more)  # the start of the prompt stays as it was
        _, call, result = later.turns
        assert (call.calls[0].name, call.calls[0].id) == ("tool_search", "c1")
        assert json.loads(call.calls[0].arguments) == {"query": "agents"}
        names = [json.loads(line)["function"]["name"] for line in result.text.splitlines()]
        assert names == ["agents__spawn", "agents__tell", "agents__spawn2"]
        called = answer(later, Turn("assistant", "", (ToolCall("c2", "agents__spawn", "{}"),)))
        assert (called[0]["namespace"], called[0]["name"]) == ("agents", "spawn")
    again = parse([*history, *called, item, found], tools=[SEARCH])
    assert again.turns[-1].text == result.text
    nothing = {"type": "tool_search_output", "call_id": "c1", "tools": []}
    assert parse([USER, item, nothing]).turns[2].text == "no tool found"
    raw = answer(request, Turn("assistant", "", (ToolCall("c1", "tool_search", "{"),)))
    assert raw[0]["arguments"] == "{"


def test_tools_that_only_the_maker_serves_are_left_out_by_name() -> None:
    space = {"type": "namespace", "name": "n", "tools": [{"type": "tool_search"}]}
    request = parse("Do it.", tools=[{"type": "web_search"}, SPAWN, space], tool_choice="required")
    assert request.tool_names == ("spawn",)
    assert request.requested["tools_left_out"] == ["web_search", "n.tool_search"]
    hosted = {"type": "tool_search", "execution": "server"}
    assert parse("Do it.", tools=[hosted]).requested["tools_left_out"] == ["tool_search"]
    assert request.requested["tool_choice"] == "required"


def test_a_shell_call_of_old_is_text_for_the_model() -> None:
    action = {"type": "exec", "command": ["ls"]}
    items = [
        USER,
        {"type": "local_shell_call", "call_id": "c1", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c1", "output": "a b"},
    ]
    _, call, output = parse(items).turns
    assert json.loads(call.calls[0].arguments) == action and call.calls[0].id == "c1"
    assert output == Turn("tool", "a b", tool_call_id="c1")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aa"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "nothing is stored here"),
    ({"conversation": "conv_1"}, "whole history"),
    ({"background": True}, "background"),
    ({"input": None}, "a string or a list"),
    ({"input": []}, "at least one message"),
    ({"input": [3]}, "an input item"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "send items in full"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "text only"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "text only"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "text only"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]}, "text only"),
    ({"input": [{"role": "judge", "content": "x"}]}, "judge"),
    ({"input": [USER, {"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "name"),
    ({"tools": "look"}, '"tools" to be a list'),
    ({"tools": [{"name": "look"}]}, '"type"'),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "a tool with a name"),
    ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "definition"),
    ({"stream": "yes"}, "true or false"),
    ({"max_output_tokens": 0}, "positive"),
    ({"model": 3}, "string"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_in_clear_words(
    change: dict[str, Any], words: str
) -> None:
    body = {"model": "m", "input": "Do it.", **change}
    with pytest.raises(RequestFault, match=r"expected .*, got ") as refused:
        OpenAIResponses().parse(body, {})
    assert words in str(refused.value)

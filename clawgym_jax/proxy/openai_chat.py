"""OpenAI Chat Completions: wire form in and out.

Not here: HTTP, prompts, sampling. Reasoning travels as `reasoning_content`, as the servers of
reasoning models do. Source: the public Chat Completions API.
Invariant: a streamed answer accumulates to exactly the answer that is not streamed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from clawgym_jax.proxy import freeform
from clawgym_jax.proxy.faults import PromptOverflow, RequestFault, invalid
from clawgym_jax.proxy.openai_errors import error_body
from clawgym_jax.proxy.protocol import dump
from clawgym_jax.proxy.tool_calls import split_thinking
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, ToolForm, Turn
from clawgym_jax.proxy.wire_text import (
    flag,
    flat_text,
    limit_of,
    named,
    optional_list,
    optional_text,
    require,
    require_turns,
    sampling_asked,
    strings_of,
    without_billing,
)

_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool": "tool_calls"}
_TEXT = ("text", "input_text", "output_text")


class OpenAIChat:
    """POST /v1/chat/completions."""

    name = "openai-chat"
    keepalive = b": keep-alive\n\n"

    # ---- in -----------------------------------------------------------------------------------

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Request:
        _require_served(body)
        messages = require(body, "messages", list, "a list of messages")
        tools = optional_list(body, "tools")
        options = body.get("stream_options") or {}
        return Request(
            protocol=self.name,
            model=optional_text(body, "model"),
            turns=require_turns([turn for turn in map(_turn, messages) if turn is not None]),
            tools=tuple(map(_tool, tools)),
            max_tok=limit_of(body, "max_completion_tokens", "max_tokens"),
            stop_strings=strings_of(body.get("stop"), "stop"),
            stream=flag(body, "stream"),
            include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
            requested=sampling_asked(body),
            headers=headers,
            tool_forms={
                tool["custom"]["name"]: ToolForm(tool["custom"]["name"], kind="custom")
                for tool in tools
                if tool.get("type") == "custom"
            },
        )

    # ---- out ----------------------------------------------------------------------------------

    def message(self, request: Request, answer: Answer) -> dict[str, Any]:
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.thinking and request.show_thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [
                _call(call, call.name in request.tool_forms) for call in turn.calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _FINISH[answer.finish],
        }
        return {
            **_shell(request, answer, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answer),
        }

    def stream_start(self, request: Request, call_id: str, prompt_tok: int) -> bytes:
        return self.keepalive

    def stream_events(self, request: Request, answer: Answer) -> Iterator[bytes]:
        message = self.message(request, answer)["choices"][0]["message"]
        content = None if message["content"] is None else ""
        yield _chunk(request, answer, {"role": "assistant", "content": content})
        for name in ("reasoning_content", "content"):
            if message.get(name):
                yield _chunk(request, answer, {name: message[name]})
        for index, call in enumerate(message.get("tool_calls", ())):
            for part in _call_parts(call):
                yield _chunk(request, answer, {"tool_calls": [{"index": index, **part}]})
        yield _chunk(request, answer, {}, _FINISH[answer.finish])
        if request.include_usage:
            shell = _shell(request, answer, "chat.completion.chunk")
            yield _data({**shell, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def stream_error(self, request: Request, call_id: str, fault: RequestFault) -> bytes:
        return _data(self.error(fault))

    def error(self, fault: RequestFault) -> dict[str, Any]:
        message = fault.message
        if isinstance(fault, PromptOverflow):
            message = (
                f"This model's maximum context length is {fault.window_tok} tokens. However, "
                f"your messages resulted in {fault.prompt_tok} tokens. Please reduce the length "
                "of the messages."
            )
        return error_body(fault, message)


def _require_served(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise invalid('"n" to be 1', body["n"], "ask once for each completion")
    if body.get("functions"):
        raise invalid('"tools" instead of "functions"', "functions", "this form is retired")
    if body.get("modalities") not in (None, ["text"]):
        raise invalid('"modalities" to be ["text"]', body["modalities"])


def _turn(message: Any) -> Turn | None:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role in ("system", "developer"):
        text = without_billing([flat_text(content, _TEXT)])
        return Turn("system", text) if text else None
    if role == "user":
        return Turn("user", flat_text(content, _TEXT))
    if role in ("tool", "function"):
        tool_call_id = str(message.get("tool_call_id", ""))
        return Turn("tool", flat_text(content, _TEXT), tool_call_id=tool_call_id)
    if role == "assistant":
        return _assistant(message, content)
    raise invalid('a message with role "system", "user", "assistant" or "tool"', message)


def _assistant(message: Mapping[str, Any], content: Any) -> Turn:
    text = flat_text(content, (*_TEXT, "refusal")) or optional_text(message, "refusal")
    thinking = optional_text(message, "reasoning_content") or optional_text(message, "reasoning")
    if not thinking:
        thinking, text = split_thinking(text)
    if message.get("function_call"):
        raise invalid('"tool_calls" instead of "function_call"', "function_call")
    calls = tuple(map(_tool_call, optional_list(message, "tool_calls")))
    return Turn("assistant", text, calls, "", thinking)


def _tool_call(call: Any) -> ToolCall:
    if not isinstance(call, dict):
        raise invalid("a tool call", call)
    call_id = str(call.get("id", ""))
    if call.get("type") == "custom":
        custom = named(call.get("custom"), "a custom tool call")
        arguments = freeform.arguments_of(optional_text(custom, "input"))
        return ToolCall(call_id, custom["name"], arguments)
    function = named(call.get("function"), 'a tool call with a "function"')
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call_id, function["name"], text)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid("a tool", tool)
    if tool.get("type") == "custom":
        custom = named(tool.get("custom"), "a custom tool")
        return freeform.function_of(custom, custom["name"])
    function = named(tool.get("function"), 'a tool of type "function" or "custom"')
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def _call(call: ToolCall, is_custom: bool) -> dict[str, Any]:
    if is_custom:
        custom = {"name": call.name, "input": freeform.input_of(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_parts(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A call as its start and the delta that fills it."""
    kind = call["type"]
    filled = "input" if kind == "custom" else "arguments"
    yield {**call, kind: {**call[kind], filled: ""}}
    yield {kind: {filled: call[kind][filled]}}


def _shell(request: Request, answer: Answer, kind: str) -> dict[str, Any]:
    digest = hashlib.blake2b(answer.call_id.encode(), digest_size=12).hexdigest()
    return {
        "id": "chatcmpl" + digest,
        "object": kind,
        "created": answer.created_s,
        "model": request.model,
    }


def _chunk(
    request: Request, answer: Answer, delta: dict[str, Any], finish: str | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return _data({**_shell(request, answer, "chat.completion.chunk"), "choices": [choice]})


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tok,
        "completion_tokens": answer.completion_tok,
        "total_tokens": answer.prompt_tok + answer.completion_tok,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tok},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tok},
    }


def _data(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"

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

from clawgym_jax.proxy.faults import FaultKind, PromptOverflow, RequestFault, invalid
from clawgym_jax.proxy.protocol import dump
from clawgym_jax.proxy.tool_calls import split_thinking
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, Turn
from clawgym_jax.proxy.wire_text import (
    flat_text,
    limit_of,
    require,
    require_turns,
    sampling_asked,
    strings_of,
    without_billing,
)

_ERRORS = {
    FaultKind.INVALID: ("invalid_request_error", None),
    FaultKind.OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    FaultKind.AUTH: ("invalid_request_error", "invalid_api_key"),
    FaultKind.NOT_FOUND: ("invalid_request_error", "not_found"),
    FaultKind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    FaultKind.INTERNAL: ("server_error", "internal_error"),
    FaultKind.OVERLOADED: ("server_error", "overloaded"),
}
_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "tool": "tool_calls"}
_TEXT = ("text", "input_text", "output_text")


class OpenAIChat:
    """POST /v1/chat/completions."""

    name = "openai-chat"
    keepalive = b": keep-alive\n\n"

    # ---- in -----------------------------------------------------------------------------------

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Request:
        if body.get("n", 1) != 1:
            raise invalid('"n" to be 1', body["n"], "ask once for each completion")
        if body.get("functions"):
            raise invalid('"tools" instead of "functions"', "functions", "this form is retired")
        messages = require(body, "messages", list, "a list of messages")
        options = body.get("stream_options") or {}
        return Request(
            protocol=self.name,
            model=str(body.get("model", "")),
            turns=require_turns([turn for turn in map(_turn, messages) if turn is not None]),
            tools=tuple(_tool(tool) for tool in body.get("tools") or ()),
            max_tok=limit_of(body, "max_completion_tokens", "max_tokens"),
            stop_strings=strings_of(body.get("stop"), "stop"),
            stream=bool(body.get("stream")),
            include_usage=bool(isinstance(options, Mapping) and options.get("include_usage")),
            requested=sampling_asked(body),
            headers=headers,
        )

    # ---- out ----------------------------------------------------------------------------------

    def message(self, request: Request, answer: Answer) -> dict[str, Any]:
        turn = answer.turn
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.thinking and request.show_thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [_call(call) for call in turn.calls]
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
        yield _chunk(request, answer, {"role": "assistant", "content": ""})
        for name in ("reasoning_content", "content"):
            if message.get(name):
                yield _chunk(request, answer, {name: message[name]})
        for index, call in enumerate(message.get("tool_calls", ())):
            start = {**call["function"], "arguments": ""}
            opened = {"index": index, **call, "function": start}
            yield _chunk(request, answer, {"tool_calls": [opened]})
            rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
            yield _chunk(request, answer, {"tool_calls": [rest]})
        yield _chunk(request, answer, {}, _FINISH[answer.finish])
        if request.include_usage:
            shell = _shell(request, answer, "chat.completion.chunk")
            yield _data({**shell, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def stream_error(self, fault: RequestFault) -> bytes:
        return _data(self.error(fault))

    def error(self, fault: RequestFault) -> dict[str, Any]:
        kind, code = _ERRORS[fault.kind]
        message = fault.message
        if isinstance(fault, PromptOverflow):
            message = (
                f"This model's maximum context length is {fault.window_tok} tokens. However, "
                f"your messages resulted in {fault.prompt_tok} tokens. Please reduce the length "
                "of the messages."
            )
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _turn(message: Any) -> Turn | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
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
    text = flat_text(content, (*_TEXT, "refusal"))
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    if not thinking:
        thinking, text = split_thinking(text)
    calls = message.get("tool_calls") or ()
    if message.get("function_call"):
        raise invalid('"tool_calls" instead of "function_call"', "function_call")
    if not isinstance(calls, list | tuple):
        raise invalid('"tool_calls" to be a list', calls)
    return Turn("assistant", text, tuple(map(_tool_call, calls)), "", str(thinking))


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid('a tool call with "function": {"name", "arguments"}', call)
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id", "")), function["name"], text)


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid('a tool of type "function" with a name', tool)
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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
    }


def _data(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"

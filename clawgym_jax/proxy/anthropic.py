"""Anthropic Messages: wire form in and out.

Not here: HTTP, prompts, sampling, what a request's messages and tools say (anthropic_input.py).
Source: the public Messages API (version 2023-06-01).
Invariant: a streamed message accumulates to exactly the message that is not streamed, but for a
call whose arguments are no object: a stream carries them raw, a whole message shows them as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from clawgym_jax.proxy.anthropic_input import tools_of, turns_of
from clawgym_jax.proxy.call_forms import arguments_object
from clawgym_jax.proxy.faults import FaultKind, PromptOverflow, RequestFault
from clawgym_jax.proxy.protocol import dump
from clawgym_jax.proxy.tool_calls import raw_calls_as_text
from clawgym_jax.proxy.turns import Answer, Request, Turn
from clawgym_jax.proxy.wire_text import (
    flag,
    limit_of,
    optional_text,
    require_turns,
    sampling_asked,
    strings_of,
)

_ERROR_TYPES = {
    FaultKind.INVALID: "invalid_request_error",
    FaultKind.OVERFLOW: "invalid_request_error",
    FaultKind.AUTH: "authentication_error",
    FaultKind.NOT_FOUND: "not_found_error",
    FaultKind.METHOD: "invalid_request_error",
    FaultKind.TOO_LARGE: "request_too_large",
    FaultKind.ENCODING: "invalid_request_error",
    FaultKind.INTERNAL: "api_error",
    FaultKind.OVERLOADED: "overloaded_error",
}
_STOP_REASONS = {
    "stop": "end_turn",
    "tool": "tool_use",
    "length": "max_tokens",
    "stop_string": "stop_sequence",
}


class AnthropicMessages:
    """POST /v1/messages."""

    name = "anthropic"
    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    # ---- in -----------------------------------------------------------------------------------

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Request:
        tools = tools_of(body)
        thinking = body.get("thinking")
        return Request(
            protocol=self.name,
            model=optional_text(body, "model"),
            turns=require_turns(turns_of(body, tools.deferred)),
            tools=tuple(tools.functions),
            max_tok=limit_of(body, "max_tokens"),
            stop_strings=strings_of(body.get("stop_sequences"), "stop_sequences"),
            stream=flag(body, "stream"),
            include_usage=True,
            show_thinking=isinstance(thinking, dict) and thinking.get("type") != "disabled",
            requested=sampling_asked(body, tools.left_out),
            headers=headers,
        )

    # ---- out ----------------------------------------------------------------------------------

    def message(self, request: Request, answer: Answer) -> dict[str, Any]:
        turn = raw_calls_as_text(answer.turn)
        finish = "stop" if answer.finish == "tool" and not turn.calls else answer.finish
        return {
            **_shell(request, answer.call_id),
            "content": _blocks(request, answer.call_id, turn),
            "stop_reason": _STOP_REASONS[finish],
            "stop_sequence": answer.stop_string if finish == "stop_string" else None,
            "usage": _usage(answer.prompt_tok, answer.cached_tok, answer.completion_tok),
        }

    def stream_start(self, request: Request, call_id: str, prompt_tok: int) -> bytes:
        message = {
            **_shell(request, call_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(prompt_tok, 0, 0),
        }
        return _event("message_start", message=message) + self.keepalive

    def stream_events(self, request: Request, answer: Answer) -> Iterator[bytes]:
        for index, block in enumerate(_blocks(request, answer.call_id, answer.turn)):
            start, deltas = _as_deltas(block)
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        stopped_at = answer.stop_string if answer.finish == "stop_string" else None
        ending = {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": stopped_at}
        usage = _usage(answer.prompt_tok, answer.cached_tok, answer.completion_tok)
        yield _event("message_delta", delta=ending, usage=usage)
        yield _event("message_stop")

    def stream_error(self, request: Request, call_id: str, fault: RequestFault) -> bytes:
        return b"event: error\ndata: " + dump(self.error(fault)) + b"\n\n"

    def error(self, fault: RequestFault) -> dict[str, Any]:
        message = fault.message
        if isinstance(fault, PromptOverflow):
            message = f"prompt is too long: {fault.prompt_tok} tokens > {fault.window_tok} maximum"
        return {"type": "error", "error": {"type": _ERROR_TYPES[fault.kind], "message": message}}


def _shell(request: Request, call_id: str) -> dict[str, Any]:
    return {
        "id": "msg" + _digest(call_id),
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _blocks(request: Request, call_id: str, turn: Turn) -> list[dict[str, Any]]:
    """A raw call has its arguments as text, which only a stream can carry."""
    blocks: list[dict[str, Any]] = []
    if turn.thinking and request.show_thinking:
        signature = "sig" + _digest(call_id + "/thinking")
        blocks.append({"type": "thinking", "thinking": turn.thinking, "signature": signature})
    if turn.text:
        blocks.append({"type": "text", "text": turn.text})
    for call in turn.calls:
        value = arguments_object(call.arguments)
        given = call.arguments if value is None else value
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as its empty start and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        given = block["input"]
        partial = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": partial}]
    return {**block, "thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


def _usage(prompt_tok: int, cached_tok: int, completion_tok: int) -> dict[str, int]:
    """A prompt's length is input_tokens and cache_read_input_tokens together."""
    return {
        "input_tokens": prompt_tok - cached_tok,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tok,
        "output_tokens": completion_tok,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dump({"type": kind, **fields}) + b"\n\n"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

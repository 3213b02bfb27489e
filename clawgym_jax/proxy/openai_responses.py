"""OpenAI Responses: wire form in and out.

No state is kept: every request brings its whole history, as harnesses with store: false do. What a
request asks for beyond that (a previous response, a conversation, work in the background) is
refused. A response does not echo instructions and tools. Not here: items (responses_items.py,
responses_events.py), tools (responses_tools.py), HTTP, prompts, sampling.
Source: the public Responses API. Invariant: a streamed response accumulates to exactly the
response that is not streamed, and its events are complete (fault A12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clawgym_jax.proxy.faults import PromptOverflow, RequestFault, invalid
from clawgym_jax.proxy.openai_errors import error_body, error_code
from clawgym_jax.proxy.responses_events import (
    Event,
    encode_events,
    item_events,
    items_of,
    response_id,
)
from clawgym_jax.proxy.responses_items import turns_of
from clawgym_jax.proxy.responses_tools import toolbox_of
from clawgym_jax.proxy.turns import Answer, Request, Turn
from clawgym_jax.proxy.wire_text import (
    flag,
    limit_of,
    optional_text,
    require_turns,
    sampling_asked,
    without_billing,
)

_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
_EVENTS_BEFORE = 2  # created, in_progress


class OpenAIResponses:
    """POST /v1/responses."""

    name = "openai-responses"
    keepalive = b": keep-alive\n\n"

    # ---- in -----------------------------------------------------------------------------------

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Request:
        for name in _STATEFUL:
            if body.get(name):
                fix = 'nothing is stored here: send the whole history as "input"'
                raise invalid(f'no "{name}"', body[name], fix)
        tools = toolbox_of(body)
        instructions = without_billing([optional_text(body, "instructions")])
        turns = [Turn("system", instructions)] if instructions else []
        turns += turns_of(body.get("input"), tools)
        return Request(
            protocol=self.name,
            model=optional_text(body, "model"),
            turns=require_turns(turns),
            tools=tuple(tools.functions),
            max_tok=limit_of(body, "max_output_tokens"),
            stream=flag(body, "stream"),
            include_usage=True,
            requested=sampling_asked(body, tools.left_out),
            headers=headers,
            tool_forms=tools.forms,
        )

    # ---- out ----------------------------------------------------------------------------------

    def message(self, request: Request, answer: Answer) -> dict[str, Any]:
        incomplete = answer.finish == "length"
        return {
            **_shell(request, answer.call_id, "incomplete" if incomplete else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": items_of(request, answer),
            "usage": _usage(answer),
        }

    def stream_start(self, request: Request, call_id: str, prompt_tok: int) -> bytes:
        shell = _shell(request, call_id, "in_progress")
        events = [(kind, {"response": shell}) for kind in ("created", "in_progress")]
        return b"".join(encode_events(iter(events), 0))

    def stream_events(self, request: Request, answer: Answer) -> Iterator[bytes]:
        return encode_events(self._events(request, answer), _EVENTS_BEFORE)

    def _events(self, request: Request, answer: Answer) -> Iterator[Event]:
        response = self.message(request, answer)
        for index, item in enumerate(response["output"]):
            yield from item_events(index, item)
        yield response["status"], {"response": response}

    def stream_error(self, request: Request, call_id: str, fault: RequestFault) -> bytes:
        error = {"code": error_code(fault) or "server_error", "message": _words(fault)}
        response = {**_shell(request, call_id, "failed"), "error": error}
        return b"".join(encode_events(iter([("failed", {"response": response})]), _EVENTS_BEFORE))

    def error(self, fault: RequestFault) -> dict[str, Any]:
        return error_body(fault, _words(fault))


def _words(fault: RequestFault) -> str:
    if isinstance(fault, PromptOverflow):
        return (
            "Your input exceeds the context window of this model: "
            f"{fault.prompt_tok} tokens > {fault.window_tok}. Please adjust your input."
        )
    return fault.message


def _shell(request: Request, call_id: str, status: str) -> dict[str, Any]:
    """A response without output; fields that clients expect but that mean nothing here too."""
    asked = request.requested
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": request.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tok,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": asked.get("temperature"),
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": [],
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tok,
        "input_tokens_details": {"cached_tokens": answer.cached_tok},
        "output_tokens": answer.completion_tok,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tok},
        "total_tokens": answer.prompt_tok + answer.completion_tok,
    }

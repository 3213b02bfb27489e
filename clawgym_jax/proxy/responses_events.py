"""Output items of the Responses API, and the events that announce them.

    created, in_progress,
    for each item: output_item.added, its parts and deltas, each closed by its done,
    output_item.done,
    then completed, incomplete or failed; sequence numbers rise by one from 0.

Not here: the response around the items (openai_responses.py).
Invariant: the items of the events are the items of the message that is not streamed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from clawgym_jax.proxy import freeform
from clawgym_jax.proxy.call_forms import arguments_object
from clawgym_jax.proxy.protocol import dump
from clawgym_jax.proxy.responses_items import seal
from clawgym_jax.proxy.turns import Answer, Request, ToolCall, ToolForm

Event = tuple[str, dict[str, Any]]  # (kind without "response.", fields)
_ITEM_PREFIX = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}


def response_id(call_id: str) -> str:
    return f"resp_{_digest(call_id)}"


def items_of(request: Request, answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, a message, calls; what is empty is left out."""
    turn = answer.turn
    items: list[dict[str, Any]] = []
    if turn.thinking:
        items.append(
            {
                "type": "reasoning",
                "summary": [_summary(turn.thinking)],
                "encrypted_content": seal(turn.thinking),
            }
        )
    if turn.text:
        items.append({"type": "message", "role": "assistant", "content": [_part(turn.text)]})
    items += [_call(call, request.tool_forms.get(call.name)) for call in turn.calls]
    for index, item in enumerate(items):
        last = index == len(items) - 1
        item["id"] = f"{_ITEM_PREFIX[item['type']]}_{_digest(f'{answer.call_id}/{index}')}"
        item["status"] = "incomplete" if last and answer.finish == "length" else "completed"
    return items


def item_events(index: int, item: dict[str, Any]) -> Iterator[Event]:
    """The whole life of one item."""
    at = {"item_id": item["id"], "output_index": index}
    yield "output_item.added", {"output_index": index, "item": _opened(item)}
    if item["type"] == "reasoning":
        yield from _text_events("reasoning_summary", "summary_index", at, item["summary"][0])
    elif item["type"] == "message":
        yield from _text_events("content", "content_index", at, item["content"][0])
    elif item["type"] == "custom_tool_call":
        yield from _whole("custom_tool_call_input", at, {"input": item["input"]}, {})
    elif item["type"] == "function_call":
        arguments = {"arguments": item["arguments"]}
        yield from _whole("function_call_arguments", at, arguments, {"name": item["name"]})
    yield "output_item.done", {"output_index": index, "item": item}


def encode_events(events: Iterator[Event], first: int) -> Iterator[bytes]:
    """Events as bytes, numbered from `first`."""
    for number, (kind, fields) in enumerate(events, first):
        kind = f"response.{kind}"
        data = dump({"type": kind, "sequence_number": number, **fields})
        yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _text_events(
    what: str, index_name: str, at: dict[str, Any], part: dict[str, Any]
) -> Iterator[Event]:
    """A part with a text: the reasoning's summary, or a message's content."""
    at = {**at, index_name: 0}
    text = "output_text" if what == "content" else f"{what}_text"
    more: dict[str, Any] = {"logprobs": []} if what == "content" else {}
    yield f"{what}_part.added", {**at, "part": {**part, "text": ""}}
    yield f"{text}.delta", {**at, "delta": part["text"], **more}
    yield f"{text}.done", {**at, "text": part["text"], **more}
    yield f"{what}_part.done", {**at, "part": part}


def _whole(
    what: str, at: dict[str, Any], value: dict[str, str], more: dict[str, Any]
) -> Iterator[Event]:
    """A value that comes in one delta."""
    yield f"{what}.delta", {**at, "delta": next(iter(value.values()))}
    yield f"{what}.done", {**at, **more, **value}


def _opened(item: dict[str, Any]) -> dict[str, Any]:
    """The item before anything of it is known."""
    empty: dict[str, Any] = {"summary": [], "content": [], "input": "", "arguments": ""}
    if item["type"] == "tool_search_call":  # it has no deltas
        empty = {}
    known = {name: empty.get(name, value) for name, value in item.items()}
    known.pop("encrypted_content", None)
    return {**known, "status": "in_progress"}


def _call(call: ToolCall, form: ToolForm | None) -> dict[str, Any]:
    form = form or ToolForm(call.name)
    if form.kind == "tool_search":
        given: Any = arguments_object(call.arguments)
        given = call.arguments if given is None else given
        searched = {"type": "tool_search_call", "call_id": call.id, "execution": "client"}
        return {**searched, "arguments": given}
    item = {"call_id": call.id, "name": form.name}
    if form.namespace:
        item["namespace"] = form.namespace
    if form.kind == "custom":
        return {"type": "custom_tool_call", **item, "input": freeform.input_of(call.arguments)}
    return {"type": "function_call", **item, "arguments": call.arguments}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

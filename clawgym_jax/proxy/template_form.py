"""Conversations in the form that Hugging Face chat templates expect, and such templates compiled.

Not here: tokens (chat_template.py). Invariant: a text that a turn carries is in the rendering, or
`require_present` raises `RequestFault`; only reasoning may be left out, which it reports.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import ToolCall, Turn


def turn_of(message: Mapping[str, Any]) -> Turn:
    """A plain {"role", "content", "tool_calls"} message as a turn."""
    calls = []
    for item in message.get("tool_calls") or ():
        function = item.get("function", item)
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ToolCall(str(item.get("id", "")), function["name"], text))
    return Turn(
        message["role"],
        message.get("content") or "",
        tuple(calls),
        str(message.get("tool_call_id", "")),
        message.get("reasoning_content") or "",
    )


def message_of(turn: Turn, escape: Callable[[str], str]) -> dict[str, Any]:
    """A turn in the form that chat templates expect."""
    message: dict[str, Any] = {"role": turn.role, "content": escape(turn.text)}
    if turn.thinking:
        message["reasoning_content"] = escape(turn.thinking)
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": _function(call, escape)} for call in turn.calls
        ]
    return message


def _function(call: ToolCall, escape: Callable[[str], str]) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"name": escape(call.name), "arguments": map_strings(arguments, escape)}


def arguments_text(call: ToolCall) -> str:
    """Arguments without \\u escapes, which could hide an added token."""
    arguments = _function(call, str)["arguments"]
    return arguments if isinstance(arguments, str) else _to_json(arguments)


def require_present(
    text: str, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Raises where the template dropped a text; returns whether it dropped reasoning."""
    position = 0
    dropped_thinking = False
    for turn, message in zip(turns, messages, strict=True):
        wanted = [message["content"].strip()]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            wanted += [call["function"]["name"]]
            wanted += [arguments if isinstance(arguments, str) else _to_json(arguments)]
        start = position
        for piece in filter(None, wanted):
            found = text.find(piece, position)
            if found < 0:
                raise invalid(
                    f"a chat template that renders every {turn.role} turn",
                    piece,
                    "this text is missing in the rendering: use a template with that role",
                )
            position = found + len(piece)
        thinking = message.get("reasoning_content", "").strip()
        dropped_thinking |= bool(thinking) and thinking not in text[start:position]
    return dropped_thinking


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {function(str(k)): map_strings(v, function) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, function) for item in value]
    return value


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", False), indent=indent)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, with a short way to the fields of messages, which are most of what is looked up."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: what a dict has no attribute for is its item, as Jinja has it too."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_TEXT_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})


def compile_template(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)

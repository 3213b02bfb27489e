"""Input items of the Responses API as turns.

An assistant turn comes back as several items: reasoning, a message, calls. Items that follow each
other form one turn, which has its reasoning first and at most one message, as it was sent.
Ids of items mean nothing; ids of calls do. Not here: tools (responses_tools.py), answers.
Invariant: an item that cannot be put before the model is an error, never skipped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym_jax.proxy import freeform
from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.responses_tools import Toolbox
from clawgym_jax.proxy.turns import ToolCall, Turn
from clawgym_jax.proxy.wire_text import (
    flat_text,
    named,
    optional_list,
    optional_text,
    without_billing,
)

_SEAL = "thought."  # starts reasoning that was sealed here
_INPUT = ("input_text", "output_text", "text")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def seal(thinking: str) -> str:
    """Reasoning as `encrypted_content`: it comes back even where its summary is dropped."""
    return _SEAL + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def turns_of(items: Any, tools: Toolbox) -> list[Turn]:
    """Turns of "input": a text, or a list of items. `tools` learns what a search found."""
    if isinstance(items, str):
        return [Turn("user", items)]
    if not isinstance(items, list):
        raise invalid('"input" to be a string or a list of items', items)
    reader = _Reader(tools)
    for item in items:
        reader.read(item)
    return reader.finish()


@dataclass(slots=True)
class _Reader:
    """Collects the items of the assistant turn that is being read."""

    tools: Toolbox
    turns: list[Turn] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def read(self, item: Any) -> None:
        if not isinstance(item, dict):
            raise invalid("an input item", item)
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            if self.texts or self.calls:
                self._close()
            self.thoughts.append(_thinking(item))
        elif kind in _CALLS:
            self.calls.append(self._call(item, kind))
        elif kind in _OUTPUTS:
            self._result(item, flat_text(item.get("output"), _INPUT))
        elif kind == "tool_search_output":
            found = self.tools.take(optional_list(item, "tools"))
            lines = [json.dumps(function, ensure_ascii=False) for function in found]
            self._result(item, "\n".join(lines) or "no tool found")
        else:
            raise invalid(
                "an input item of type message, reasoning, function_call, custom_tool_call or "
                "one of their outputs",
                kind if kind else item,
                "no state is kept here and no built-in tool is served: send items in full",
            )

    def finish(self) -> list[Turn]:
        self._close()
        return self.turns

    def _result(self, item: Mapping[str, Any], text: str) -> None:
        self._close()
        self.turns.append(Turn("tool", text, tool_call_id=_call_id(item)))

    def _message(self, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            if self.texts:
                self._close()
            self.texts.append(flat_text(content, (*_INPUT, "refusal")))
            return
        self._close()
        if role in ("system", "developer"):
            if text := without_billing([flat_text(content, _INPUT)]):
                self.turns.append(Turn("system", text))
        elif role == "user":
            self.turns.append(Turn("user", flat_text(content, _INPUT)))
        else:
            raise invalid('a role "user", "assistant", "system" or "developer"', role)

    def _call(self, item: Mapping[str, Any], kind: str) -> ToolCall:
        call_id = _call_id(item)
        if kind == "local_shell_call":
            return ToolCall(call_id, "local_shell", _dumped(item.get("action")))
        if kind == "tool_search_call":
            return ToolCall(call_id, "tool_search", _dumped(item.get("arguments")))
        name = named(item, "a call")["name"]
        visible = self.tools.visible(optional_text(item, "namespace"), name)
        if kind == "custom_tool_call":
            return ToolCall(call_id, visible, freeform.arguments_of(optional_text(item, "input")))
        return ToolCall(call_id, visible, optional_text(item, "arguments") or "{}")

    def _close(self) -> None:
        thinking = "\n".join(filter(None, self.thoughts))
        if thinking or self.texts or self.calls:
            text = "\n".join(self.texts)
            self.turns.append(Turn("assistant", text, tuple(self.calls), "", thinking))
        self.thoughts, self.texts, self.calls = [], [], []


def _call_id(item: Mapping[str, Any]) -> str:
    return str(item.get("call_id") or item.get("id") or "")


def _dumped(value: Any) -> str:
    """Arguments that are sent as a JSON value instead of its text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _thinking(item: Mapping[str, Any]) -> str:
    """The reasoning itself, its summary (the same here), or what was sealed."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if text := flat_text(optional_list(item, name), (kind, "text")):
            return text
    sealed = optional_text(item, "encrypted_content")
    if sealed.startswith(_SEAL):
        try:
            return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode("utf-8")
        except ValueError as error:
            raise invalid("encrypted_content as it was sent", sealed, str(error)) from error
    return ""

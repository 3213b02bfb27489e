"""Messages and tools of the Anthropic Messages API as turns and functions.

`cache_control`, ids of messages and signatures of reasoning mean nothing to the model and are left
out; so are, by name, tools that only the protocol's maker serves. A tool whose loading is deferred
is not at the start of the prompt: it is told where a tool result refers to it, so that a prompt
grows at its end only when a harness finds a tool. Not here: answers (anthropic.py).
Invariant: a block that cannot be put before the model is an error, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import ToolCall, Turn
from clawgym_jax.proxy.wire_text import (
    block_text,
    flag,
    flat_text,
    named,
    optional_list,
    optional_text,
    require,
    without_billing,
)

Functions = Mapping[str, Mapping[str, Any]]
_HOSTED_SEARCH = "tool_search_tool"  # starts the type of a search that the maker does


@dataclass(slots=True)
class Tools:
    """Tools of one request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    deferred: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name, told later
    left_out: list[str] = field(default_factory=list)  # kinds that cannot be served here


def tools_of(body: Mapping[str, Any]) -> Tools:
    """Where the maker would search, nothing is deferred: no search can be served here."""
    tools = Tools()
    given = [named(tool, "a tool") for tool in optional_list(body, "tools")]
    hosted = any(str(tool.get("type")).startswith(_HOSTED_SEARCH) for tool in given)
    for tool in given:
        if tool.get("type") not in (None, "custom"):
            tools.left_out.append(str(tool["type"]))
        elif flag(tool, "defer_loading") and not hosted:
            tools.deferred[tool["name"]] = _function(tool)
        else:
            tools.functions.append(_function(tool))
    return tools


def turns_of(body: Mapping[str, Any], deferred: Functions) -> list[Turn]:
    """The system text and all messages."""
    system = _system_text(body.get("system"))
    turns = [Turn("system", system)] if system else []
    for message in require(body, "messages", list, "a list of messages"):
        turns += _turns_of_message(message, deferred)
    return turns


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool["name"]}
    if description := optional_text(tool, "description"):
        function["description"] = description
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise invalid('"input_schema" to be an object', schema)
    return {"type": "function", "function": {**function, "parameters": schema}}


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return without_billing([system or ""])
    if not isinstance(system, list):
        raise invalid('"system" to be a string or a list of text blocks', system)
    return without_billing([block_text(block) for block in system])


def _turns_of_message(message: Any, deferred: Functions) -> list[Turn]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system", "developer"):
        raise invalid('a message with role "user", "assistant" or "system"', message)
    content = message.get("content")
    if role == "assistant":
        return [_assistant(content)]
    if role in ("system", "developer"):
        text = without_billing([flat_text(content)])
        return [Turn("system", text)] if text else []
    if isinstance(content, str):
        return [Turn("user", content)]
    blocks = require(message, "content", list, "a string or a list of blocks")
    return _user(blocks, deferred)


def _user(blocks: list[Any], deferred: Functions) -> list[Turn]:
    """Tool results are turns of their own; texts between them are joined."""
    turns: list[Turn] = []
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                turns.append(Turn("user", "\n".join(texts)))
                texts = []
            tool_use_id = str(block.get("tool_use_id", ""))
            result = _result(block.get("content"), deferred)
            turns.append(Turn("tool", result, tool_call_id=tool_use_id))
        else:
            texts.append(block_text(block))
    if texts or not turns:
        turns.append(Turn("user", "\n".join(texts)))
    return turns


def _result(content: Any, deferred: Functions) -> str:
    """Text of a tool result; a reference to a tool tells what the tool is."""
    if not isinstance(content, list):
        return flat_text(content)
    texts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_reference":
            name = optional_text(block, "tool_name")
            known = deferred.get(name)
            texts.append(json.dumps(known, ensure_ascii=False) if known else name)
        else:
            texts.append(block_text(block))
    return "\n".join(texts)


def _assistant(content: Any) -> Turn:
    if isinstance(content, str):
        return Turn("assistant", content)
    if not isinstance(content, list):
        raise invalid("assistant content as a string or a list of blocks", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            name = named(block, "a tool_use block")["name"]
            calls.append(ToolCall(str(block.get("id", "")), name, arguments))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block_text(block))
    return Turn("assistant", "\n".join(texts), tuple(calls), "", "\n".join(thoughts))

"""What a finished completion says: reasoning, text and tool calls, parsed once and as a whole.

Form: Qwen3's `<think>...</think>` and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
A block that is no valid call stays in the text as it is, and is counted. Not here: token ids
(the record keeps them whatever the parser makes of the text).
Invariant: every non-blank character of a completion is in the reasoning, the text or a call.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from clawgym_jax.proxy.turns import ToolCall, Turn

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THINK = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_MAX_EXACT = 1 << 53


@dataclass(frozen=True, slots=True)
class Parsed:
    turn: Turn
    malformed: int  # blocks that look like calls and are none


def parse_completion(text: str, call_id: str, cut: bool, thinking_open: bool = False) -> Parsed:
    """cut: the completion did not end by itself. thinking_open: the prompt opened <think>."""
    thinking, rest = split_thinking("<think>" + text if thinking_open else text)
    outside: list[str] = []
    calls: list[ToolCall] = []
    malformed = 0
    position = 0
    for block in _BLOCK.finditer(rest):
        found = None if cut and not block[2] else _read_call(block[1])
        if found is None:
            malformed += 1
            continue
        outside.append(rest[position : block.start()])
        position = block.end()
        calls.append(ToolCall(tool_call_id(call_id, len(calls)), *found))
    outside.append(rest[position:])
    said = "\n".join(piece.strip() for piece in outside if piece.strip())
    return Parsed(Turn("assistant", said, tuple(calls), "", thinking), malformed)


def split_thinking(text: str) -> tuple[str, str]:
    """(reasoning, rest) of text that may start with a <think> block."""
    block = _THINK.match(text)
    if block is None:
        return "", text
    return block[1].strip(), text[block.end() :]


def tool_call_id(call_id: str, index: int) -> str:
    """Alphanumeric only (some harnesses drop the rest), unique wherever call ids are."""
    return "call" + hashlib.blake2b(f"{call_id}/{index}".encode(), digest_size=12).hexdigest()


def canonical_arguments(arguments: str) -> str:
    """One spelling for all serialisations of the same JSON value; other text stays."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments.strip()
    return json.dumps(_plain_numbers(value), sort_keys=True, separators=(",", ":"))


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_call(block: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text), or None where the block is no valid call."""
    try:
        call = json.loads(block, parse_constant=_refuse_constant)
        if not isinstance(call, dict) or set(call) - {"name", "arguments"}:
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (ValueError, RecursionError):  # 1e999 and a lone surrogate are ValueErrors too
        return None
    return name, text

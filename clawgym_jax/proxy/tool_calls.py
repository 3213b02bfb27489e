"""What a finished completion says: reasoning, text and tool calls, parsed once and as a whole.

Parsers have names, so that a configuration can choose one: "qwen3" and "qwen3_xml" read Qwen3's
`<think>...</think>` and one form of calls each (call_forms.py); "none" takes all as text. A closed
block whose name can be read is a call even where its arguments are no JSON object: the harness
gets them raw, answers the model and goes on. Any other broken block stays in the text; both are
counted. Not here: token ids (the record keeps them whatever the parser makes of the text).
Invariant: every non-blank character of a completion is in the reasoning, the text or a call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.call_forms import (
    CLOSE,
    OPEN,
    Reader,
    Tools,
    arguments_object,
    read_json,
    read_xml,
)
from clawgym_jax.proxy.turns import ToolCall, Turn

_THINK = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_MAX_EXACT = 1 << 53


@dataclass(frozen=True, slots=True)
class Parsed:
    turn: Turn
    malformed: int  # blocks that look like calls and are no valid ones


class CompletionParser(Protocol):
    """cut: the completion did not end by itself. thinking_open: the prompt opened <think>."""

    def __call__(
        self,
        text: str,
        call_id: str,
        cut: bool,
        thinking_open: bool = False,
        tools: Tools = (),
    ) -> Parsed: ...


def parse_completion(
    text: str, call_id: str, cut: bool, thinking_open: bool = False, tools: Tools = ()
) -> Parsed:
    """Qwen3's own form."""
    return _parse(read_json, text, call_id, cut, thinking_open, tools)


def parse_xml_completion(
    text: str, call_id: str, cut: bool, thinking_open: bool = False, tools: Tools = ()
) -> Parsed:
    """Qwen3-Coder's form."""
    return _parse(read_xml, text, call_id, cut, thinking_open, tools)


def parse_plain(
    text: str, call_id: str, cut: bool, thinking_open: bool = False, tools: Tools = ()
) -> Parsed:
    """All of it is text."""
    return Parsed(Turn("assistant", text.strip()), 0)


PARSERS: Mapping[str, CompletionParser] = {
    "qwen3": parse_completion,
    "qwen3_xml": parse_xml_completion,
    "none": parse_plain,
}


def parser_named(name: str) -> CompletionParser:
    """Raises ConfigError for an unknown name."""
    if name not in PARSERS:
        raise ConfigError(f"parser: expected one of {sorted(PARSERS)}, got {name!r}")
    return PARSERS[name]


def _parse(
    read: Reader, text: str, call_id: str, cut: bool, thinking_open: bool, tools: Tools
) -> Parsed:
    thinking, rest = split_thinking("<think>" + text if thinking_open else text)
    outside: list[str] = []
    calls: list[ToolCall] = []
    malformed = kept = position = 0
    while (start := rest.find(OPEN, position)) >= 0:
        block = read(rest, start + len(OPEN), tools)
        position = block.end
        malformed += not block.well_formed or (cut and not block.closed)
        if block.name and (block.closed or (block.well_formed and not cut)):
            outside.append(rest[kept:start])
            kept = block.end
            identity = tool_call_id(call_id, len(calls))
            calls.append(ToolCall(identity, block.name, block.arguments))
    outside.append(rest[kept:])
    said = "\n".join(piece.strip() for piece in outside if piece.strip())
    return Parsed(Turn("assistant", said, tuple(calls), "", thinking), malformed)


def split_thinking(text: str) -> tuple[str, str]:
    """(reasoning, rest) of text that may start with a <think> block, closed or not."""
    block = _THINK.match(text)
    if block is None:
        return "", text
    return block[1].strip(), text[block.end() :]


def raw_calls_as_text(turn: Turn) -> Turn:
    """The turn for a wire form whose calls must be objects: raw arguments are shown as text."""
    broken = [call for call in turn.calls if arguments_object(call.arguments) is None]
    if not broken:
        return turn
    blocks = [
        f'{OPEN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{CLOSE}'
        for call in broken
    ]
    text = "\n".join(filter(None, [turn.text, *blocks]))
    calls = tuple(call for call in turn.calls if call not in broken)
    return Turn(turn.role, text, calls, turn.tool_call_id, turn.thinking)


def tool_call_id(call_id: str, index: int) -> str:
    """Alphanumeric only (some harnesses drop the rest), unique wherever call ids are."""
    return "call" + hashlib.blake2b(f"{call_id}/{index}".encode(), digest_size=12).hexdigest()


def canonical_arguments(arguments: str) -> str:
    """One spelling for all serialisations of the same JSON value; other text stays."""
    try:
        value = _plain_numbers(json.loads(arguments))
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments.strip()


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value

"""How models write tool calls: one reader for each form.

    json   <tool_call>{"name": "look", "arguments": {"path": "a"}}</tool_call>          (Qwen3)
    xml    <tool_call><function=look><parameter=path>a</parameter></function></tool_call>
           (Qwen3-Coder; values are text, typed by the tool's schema)

Not here: which text is outside of calls, ids of calls (tool_calls.py).
Invariant: a reader never raises, whatever a model writes, and always goes forward in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Tools = Sequence[Mapping[str, Any]]

_NAME_FIRST = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(.*)\}\s*\Z', re.DOTALL
)
_NAME_LAST = re.compile(
    r'\s*\{\s*"arguments"\s*:\s*(.*),\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*\}\s*\Z', re.DOTALL
)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between an opening tag and its closing tag, or the end of the text."""

    end: int  # index after the block
    closed: bool
    name: str = ""  # "": none can be read
    arguments: str = ""  # JSON text of an object, or raw text where it is none
    well_formed: bool = False


Reader = Callable[[str, int, Tools], Block]  # (text, index after the opening tag, tools)


def read_json(text: str, start: int, tools: Tools) -> Block:
    """Qwen3's form. A closing tag inside of a JSON string does not end the block."""
    try:
        call, end = _DECODER.raw_decode(text, _skip_space(text, start))
        end = _skip_space(text, end)
    except (ValueError, RecursionError):
        call, end = None, -1
    closed = end >= 0 and text.startswith(CLOSE, end)
    if closed or end == len(text):
        end += len(CLOSE) if closed else 0
        found = _plain_call(call)
        if found is not None:
            return Block(end, closed, *found, well_formed=True)
    return _raw_json(text, start)


def _raw_json(text: str, start: int) -> Block:
    """A block that is no valid call: its name, and its arguments as they stand."""
    inside, end, closed = _until_close(text, start)
    for pattern, name_group, arguments_group in ((_NAME_FIRST, 1, 2), (_NAME_LAST, 2, 1)):
        found = pattern.match(inside)
        if found is None:
            continue
        name = strict_json(found[name_group])
        if isinstance(name, str) and name:
            return Block(end, closed, name, found[arguments_group].strip())
    return Block(end, closed)


def read_xml(text: str, start: int, tools: Tools) -> Block:
    """Qwen3-Coder's form."""
    inside, end, closed = _until_close(text, start)
    function = _FUNCTION.match(inside)
    if function is None or not function[1].strip():
        return Block(end, closed)
    name, body = function[1].strip(), function[2]
    types = _types_of(name, tools)
    arguments: dict[str, Any] = {}
    position = 0
    while position < len(body):
        parameter = _PARAMETER.match(body, position)
        if parameter is None:
            break
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2], types.get(key, "string"))
        position = parameter.end()
    if body[position:].strip():
        return Block(end, closed, name, body.strip())
    return Block(end, closed, name, json.dumps(arguments, ensure_ascii=False), well_formed=True)


def arguments_object(arguments: str) -> dict[str, Any] | None:
    """Arguments as an object; None where the text is no strict JSON object."""
    value = strict_json(arguments)
    return value if isinstance(value, dict) else None


def strict_json(text: str) -> Any:
    """The JSON value of a text that can be stored and sent again; None where there is none."""
    try:
        value = _DECODER.decode(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):  # 1e999 and a lone surrogate are ValueErrors too
        return None
    return value


def _plain_call(call: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a valid call."""
    if not isinstance(call, dict) or set(call) - {"name", "arguments"}:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return name, text


def _until_close(text: str, start: int) -> tuple[str, int, bool]:
    """(what is inside, index after it, whether it is closed)."""
    end = text.find(CLOSE, start)
    if end < 0:
        return text[start:], len(text), False
    return text[start:end], end + len(CLOSE), True


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _types_of(name: str, tools: Tools) -> dict[str, Any]:
    """Declared type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", {})
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, Mapping):
            properties = parameters.get("properties")
            if isinstance(properties, Mapping):
                return {
                    key: form.get("type", "string")
                    for key, form in properties.items()
                    if isinstance(form, Mapping)
                }
    return {}


def _typed(text: str, kind: Any) -> Any:
    """A parameter's value; text where it is declared so or is no JSON."""
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    value = strict_json(text)
    return text if value is None and text.strip() != "null" else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

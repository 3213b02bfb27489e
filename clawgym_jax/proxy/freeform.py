"""Tools that are called with plain text: OpenAI's `custom` tools.

The model sees a function with one string parameter "input"; the harness sees the bare text.
Not here: where a protocol puts these (protocol files).
Invariant: arguments_of(input_of(x)) is x in another spelling, for arguments of the right shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clawgym_jax.proxy.call_forms import arguments_object
from clawgym_jax.proxy.faults import invalid

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "Plain text, not JSON."}},
    "required": ["input"],
}


def function_of(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A freeform tool as a function; its grammar becomes part of the description."""
    function: dict[str, Any] = {"name": name}
    parts = [tool.get("description") or "", _grammar(tool.get("format"))]
    if any(not isinstance(part, str) for part in parts):
        raise invalid("a tool's description as a string", parts[0])
    if description := "\n\n".join(filter(None, parts)):
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": _PARAMETERS}}


def input_of(arguments: str) -> str:
    """The text that a call carries; arguments of another shape go out as they are."""
    value = arguments_object(arguments)
    if value is not None and set(value) == {"input"} and isinstance(value["input"], str):
        return value["input"]
    return arguments


def arguments_of(text: str) -> str:
    """Arguments of a call that a harness shows as bare text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _grammar(form: Any) -> str:
    """Responses writes the grammar into the format, Chat Completions one level deeper."""
    if form is None or (isinstance(form, dict) and form.get("type", "text") == "text"):
        return ""
    if isinstance(form, dict):
        inner = form.get("grammar", form)
        if isinstance(inner, dict) and isinstance(inner.get("definition"), str):
            return (
                f"The input follows this {inner.get('syntax', '')} grammar:\n{inner['definition']}"
            )
    raise invalid('a tool\'s format to be text or a grammar with a "definition"', form)

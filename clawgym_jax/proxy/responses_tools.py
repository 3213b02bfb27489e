"""Tools of the Responses API as functions, and how each is called on the wire.

function: as it is. custom: a function of one text (freeform.py). namespace: each tool in it, under
a name that is unique among all tools. What only the API's maker can serve (web_search, ...) is
left out of the prompt and named, because harnesses declare such tools whoever serves them.
Not here: items (responses_items.py). Invariant: every wire name maps to one visible name and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym_jax.proxy import freeform
from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import ToolForm
from clawgym_jax.proxy.wire_text import named, optional_list, optional_text

_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(slots=True)
class Toolbox:
    """Tools of one request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, ToolForm] = field(default_factory=dict)  # by visible name, where they differ
    left_out: list[str] = field(default_factory=list)  # kinds that cannot be served here
    _visible: dict[tuple[str, str], str] = field(default_factory=dict)  # by (namespace, name)

    def visible(self, namespace: str, name: str) -> str:
        """What the model calls a tool; also for one that this request does not bring along."""
        if not namespace:
            return name
        return self._visible.get((namespace, name)) or _joined(namespace, name)

    def add(self, tool: Mapping[str, Any], namespace: str, preface: str) -> None:
        """A function or custom tool; preface: what is said of its namespace."""
        bare = named(tool, "a tool")["name"]
        name = self._unique(_joined(namespace, bare)) if namespace else bare
        description = "\n\n".join(filter(None, [preface, optional_text(tool, "description")]))
        tool = {**tool, "description": description}
        is_custom = tool.get("type") == "custom"
        self.functions.append(freeform.function_of(tool, name) if is_custom else _as(tool, name))
        if namespace:
            self._visible[namespace, bare] = name
        if namespace or is_custom:
            self.forms[name] = ToolForm(bare, namespace, is_custom)

    def _unique(self, name: str) -> str:
        taken = {function["function"]["name"] for function in self.functions}
        candidates = [name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))]
        return next(candidate for candidate in candidates if candidate not in taken)


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    """Plain tools first, so that they keep their names, then those of namespaces."""
    box = Toolbox()
    spaces = []
    for tool in optional_list(body, "tools"):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise invalid('a tool with a "type"', tool)
        if kind in ("function", "custom"):
            box.add(tool, "", "")
        elif kind == "namespace":
            spaces.append(named(tool, "a namespace"))
        else:
            box.left_out.append(kind)
    for space in spaces:
        for preface, tool in _inner(space, box.left_out):
            box.add(tool, space["name"], preface)
    return box


def _inner(
    space: Mapping[str, Any], left_out: list[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Tools of a namespace; the first one carries what is said of all."""
    about = optional_text(space, "description")
    preface = f"{space['name']}: {about}" if about else ""
    for tool in optional_list(space, "tools"):
        if not isinstance(tool, Mapping):
            raise invalid("a tool in a namespace", tool)
        kind = tool.get("type", "function")
        if kind in ("function", "custom"):
            yield preface, tool
            preface = ""
        else:
            left_out.append(f"{space['name']}.{kind}")


def _as(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if tool["description"]:
        function["description"] = tool["description"]
    function["parameters"] = tool.get("parameters") or _NO_PARAMETERS
    return {"type": "function", "function": function}


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"

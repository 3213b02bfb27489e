"""Tools of the Responses API as functions, and how each is called on the wire.

function: as it is. custom: a function of one text (freeform.py). namespace: each tool in it, under
a name that is unique among all tools. tool_search, where the client does the search: a function;
what it finds is told in its output and can be called from then on. What only the API's maker can
serve (web_search, ...) is left out of the prompt and named, because harnesses declare such tools
whoever serves them.
Not here: items (responses_items.py). Invariant: every wire name maps to one visible name and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym_jax.proxy import freeform
from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import ToolForm
from clawgym_jax.proxy.wire_text import named, optional_list, optional_text

_NO_PARAMETERS = {"type": "object", "properties": {}}
_SERVED = ("function", "custom")
SEARCH = "tool_search"


@dataclass(slots=True)
class Toolbox:
    """Tools of one request: those that it brings, and those that searches in its history found."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # that it brings
    forms: dict[str, ToolForm] = field(default_factory=dict)  # by visible name, where they differ
    left_out: list[str] = field(default_factory=list)  # kinds that cannot be served here
    _taken: set[str] = field(default_factory=set)
    _visible: dict[tuple[str, str], str] = field(default_factory=dict)  # by (namespace, name)

    def visible(self, namespace: str, name: str) -> str:
        """What the model calls a tool; also for one that this request does not bring along."""
        if not namespace:
            return name
        return self._visible.get((namespace, name)) or _joined(namespace, name)

    def take(self, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """Functions of tools: plain ones first, so that they keep their names, then namespaces'."""
        functions = []
        spaces = []
        for tool in tools:
            kind = tool.get("type") if isinstance(tool, dict) else None
            if not isinstance(kind, str):
                raise invalid('a tool with a "type"', tool)
            if kind in _SERVED:
                functions.append(self._add(tool, "", ""))
            elif kind == "namespace":
                spaces.append(named(tool, "a namespace"))
            elif kind == SEARCH and tool.get("execution") == "client":
                functions.append(self._add({**tool, "name": SEARCH}, "", ""))
            else:
                self.left_out.append(kind)
        for space in spaces:
            for preface, tool in self._inner(space):
                functions.append(self._add(tool, space["name"], preface))
        return functions

    def _inner(self, space: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Tools of a namespace; the first one carries what is said of all."""
        about = optional_text(space, "description")
        preface = f"{space['name']}: {about}" if about else ""
        for tool in optional_list(space, "tools"):
            if not isinstance(tool, dict):
                raise invalid("a tool in a namespace", tool)
            kind = tool.get("type", "function")
            if kind in _SERVED:
                yield preface, tool
                preface = ""
            else:
                self.left_out.append(f"{space['name']}.{kind}")

    def _add(self, tool: Mapping[str, Any], namespace: str, preface: str) -> dict[str, Any]:
        """preface: what is said of the tool's namespace."""
        bare = named(tool, "a tool")["name"]
        name = self._name(namespace, bare)
        self._taken.add(name)
        kind = tool.get("type", "function")
        if namespace or kind != "function":
            self.forms[name] = ToolForm(bare, namespace, kind)
        description = "\n\n".join(filter(None, [preface, optional_text(tool, "description")]))
        tool = {**tool, "description": description}
        return freeform.function_of(tool, name) if kind == "custom" else _function(tool, name)

    def _name(self, namespace: str, bare: str) -> str:
        if not namespace:
            return bare
        if (namespace, bare) not in self._visible:
            name = _joined(namespace, bare)
            candidates = [name, *(f"{name}_{n}" for n in range(2, len(self._taken) + 3))]
            self._visible[namespace, bare] = next(c for c in candidates if c not in self._taken)
        return self._visible[namespace, bare]


def toolbox_of(body: Mapping[str, Any]) -> Toolbox:
    """The tools that a request brings."""
    box = Toolbox()
    box.functions = box.take(optional_list(body, "tools"))
    return box


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if tool["description"]:
        function["description"] = tool["description"]
    function["parameters"] = tool.get("parameters") or _NO_PARAMETERS
    return {"type": "function", "function": function}


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"

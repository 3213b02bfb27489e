"""Conversations of the size that Claude Code has: a long system prompt, 12 tools, tool results.

The words are made up; sizes and shape are what was measured of the real program (a body of about
90 kB and 20,000 tokens after ten turns).
Invariant: a conversation depends on its seed only; its system prompt and tools are all alike.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

SYSTEM_CHARS = 29_000
TOOL_CHARS = 3_300  # of one tool's description
FIRST_CHARS = 3_000
RESULT_CHARS = 1_600
TOOLS = 12
_WORDS = (
    "the file agent should read before it writes and never change what was not asked for use a "
    "tool when you need one result path output error value list name test build code function "
    "class return import line check run command workspace project note report table column total "
    "first second next then when where which every other small large new old same different"
).split()


def prose(rng: random.Random, chars: int) -> str:
    """Sentences and bullet points."""
    parts: list[str] = []
    length = 0
    while length < chars:
        sentence = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(6, 16)))
        part = (
            rng.choice(("- ", "", "", "  * ")) + sentence.capitalize() + rng.choice((". ", ".\n"))
        )
        parts.append(part)
        length += len(part)
    return "".join(parts)[:chars]


def listing(rng: random.Random, chars: int) -> str:
    """What a tool prints: paths, numbers, code."""
    lines: list[str] = []
    length = 0
    while length < chars:
        name, other = rng.choice(_WORDS), rng.choice(_WORDS)
        line = (
            f"{rng.randrange(10**5):6d}  src/{name}/{other}.py:{rng.randrange(900)}: x = {name}()"
        )
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines)[:chars]


@functools.cache
def system_and_tools() -> tuple[str, list[tuple[str, str]]]:
    common = random.Random(0)
    system = prose(common, SYSTEM_CHARS)
    return system, [(f"Tool{i}", prose(common, TOOL_CHARS)) for i in range(TOOLS)]


class Talk:
    """One conversation; `hear` adds an answer and the result of its tool call."""

    def __init__(self, seed: int) -> None:
        own = random.Random(seed + 1)
        self._rng = own
        self.system, self.tools = system_and_tools()
        self.turns: list[tuple[str, str, str]] = [("user", "", prose(own, FIRST_CHARS))]

    def hear(self, text: str, tool_call_id: str, name: str, arguments: str) -> None:
        self.turns.append(("assistant", text, json.dumps([tool_call_id, name, arguments])))
        self.turns.append(("tool", tool_call_id, listing(self._rng, RESULT_CHARS)))

    def anthropic(self, stream: bool = False) -> bytes:
        messages = []
        for role, key, text in self.turns:
            if role == "user":
                messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
            elif role == "tool":
                block = {"type": "tool_result", "tool_use_id": key, "content": text}
                messages.append({"role": "user", "content": [block]})
            else:
                call_id, name, arguments = json.loads(text)
                use = {"type": "tool_use", "id": call_id, "name": name}
                content = [{"type": "text", "text": key}, {**use, "input": json.loads(arguments)}]
                messages.append({"role": "assistant", "content": content})
        body = {
            "model": "m",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": self.system}],
            "tools": [
                {"name": name, "description": text, "input_schema": _schema()}
                for name, text in self.tools
            ],
            "messages": messages,
            "stream": stream,
        }
        return json.dumps(body).encode()

    def chat(self, stream: bool = False) -> bytes:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        for role, key, text in self.turns:
            if role == "user":
                messages.append({"role": "user", "content": text})
            elif role == "tool":
                messages.append({"role": "tool", "tool_call_id": key, "content": text})
            else:
                call_id, name, arguments = json.loads(text)
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                messages.append({"role": "assistant", "content": key, "tool_calls": [call]})
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": text, "parameters": _schema()},
            }
            for name, text in self.tools
        ]
        body = {"model": "m", "messages": messages, "tools": tools, "stream": stream}
        return json.dumps(body).encode()


def _schema() -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": name} for name in ("path", "text", "mode")
    }
    return {"type": "object", "properties": properties, "required": ["path"]}

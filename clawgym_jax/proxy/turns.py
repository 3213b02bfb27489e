"""The protocol-neutral form of a request and of an answer.

Each protocol file parses its wire form into a `Request` and writes an `Answer` back. Nothing here
knows a wire form, tokens or sessions.
Invariant: every text that the wire form carries for the model is in some field of some turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

FinishKind = Literal["stop", "tool", "length", "stop_string"]
TurnRole = Literal["system", "user", "assistant", "tool"]
CallKind = Literal["function", "custom", "tool_search"]  # custom: called with plain text


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One call of a tool, as an assistant turn carries it."""

    id: str
    name: str
    arguments: str  # JSON text of an object; any text where the harness re-presents a broken call


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One message. List contents are flattened to text; the developer role is system.

    Every request makes one for each message of its history, so they are of the cheapest kind: made
    in 0.1 us instead of 1, and nothing that the collector of cycles looks at.
    """

    role: TurnRole
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool result
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a tool is named and called on the wire, where that is not how the model sees it."""

    name: str
    namespace: str = ""
    kind: CallKind = "function"


@dataclass(frozen=True, slots=True)
class Request:
    """What a harness asks for, whatever protocol it asked in."""

    protocol: str
    model: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...]  # {"type": "function", "function": {name, ...}}
    max_tok: int | None  # as asked
    stop_strings: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False  # in the stream; Anthropic always does
    show_thinking: bool = True
    requested: Mapping[str, Any] = field(default_factory=dict)  # sampling fields as asked
    headers: Mapping[str, str] = field(default_factory=dict)  # lower-case names
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)  # by name as the model sees it
    created_s: int = field(default_factory=lambda: int(time.time()), compare=False)

    @property
    def carries_raw_calls(self) -> bool:
        """Whether a call whose arguments are no JSON object can be shown to the harness."""
        return self.protocol != "anthropic" or self.stream

    @property
    def is_retry(self) -> bool:
        """The client library says that it sends the same request again."""
        return self.headers.get("x-stainless-retry-count", "0") not in ("", "0")

    @property
    def system(self) -> str:
        """System text before the first other turn; what comes later is news, not another agent."""
        leading = itertools.takewhile(lambda turn: turn.role == "system", self.turns)
        return "\n".join(turn.text for turn in leading)

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(str(tool["function"]["name"]) for tool in self.tools)

    def user_text(self, last: bool) -> str:
        """Text of the first (or last) user turn; empty where there is none."""
        texts = [turn.text for turn in self.turns if turn.role == "user"]
        return texts[-1 if last else 0] if texts else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the harness gets to see of one recorded call."""

    call_id: str
    turn: Turn
    finish: FinishKind
    stop_string: str | None
    prompt_tok: int
    completion_tok: int
    cached_tok: int
    reasoning_tok: int = 0  # of completion_tok
    malformed_calls: int = 0
    created_s: int = 0

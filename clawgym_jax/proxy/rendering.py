"""Stretches of rendered text with their ids, and memories for them.

Environment text is encoded once: an episode keeps the ids of every stretch of its own history, so
that a call costs its new text only, however long the history is; a memory for all episodes keeps
recent stretches, since the episodes of a group start with the same long text.
Not here: how text becomes ids (chat_template.py).
Invariant: kept ids are read-only, so that no prompt can change another one's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from clawgym_jax.proxy.turns import Turn


def packed(value: Any) -> bytes:
    """Equal for equal JSON values."""
    try:
        return _PACKER.encode(value)
    except (OverflowError, RecursionError, ValueError):  # long integers, half surrogates
        return json.dumps(value).encode()


_PACKER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Stretch:
    """Turns between two sampled turns; the first one of a conversation begins with the tools."""

    turns: tuple[Turn, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    tools_key: bytes = b""  # the same in bytes
    first: bool = True

    @property
    def chars(self) -> int:
        return len(self.tools_key) + sum(len(t.text) + len(t.thinking) for t in self.turns)

    @functools.cached_property
    def key(self) -> bytes:
        """Equal for stretches that are rendered alike."""
        turns = [
            [t.role, t.text, t.thinking, [[c.name, c.arguments] for c in t.calls]]
            for t in self.turns
        ]
        return hashlib.sha256(packed([self.first, self.tools_key, turns])).digest()[:16]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A stretch of environment text."""

    text: str
    ids: np.ndarray  # i32[N]
    dropped_thinking: bool = False  # the template leaves a turn's reasoning out


@dataclass(frozen=True, slots=True)
class Kept:
    """What is remembered of a rendering."""

    ids: np.ndarray  # i32[N], read-only
    dropped_thinking: bool


Tools = tuple[Mapping[str, Any], ...]
_MOST_TOOL_SETS = 256
Render = Callable[[Stretch], Rendering]


class RenderingCache:
    """Recent renderings of all episodes, up to a number of tokens."""

    def __init__(self, budget_tok: int) -> None:
        self._budget_tok = budget_tok
        self._used_tok = 0
        self._entries: OrderedDict[bytes, Kept] = OrderedDict()
        self._tools: OrderedDict[bytes, Tools] = OrderedDict()

    def one_copy(self, tools_key: bytes, tools: Tools) -> Tools:
        """Equal tools, those of an earlier request where there was one."""
        found = self._tools.setdefault(tools_key, tools)
        if len(self._tools) > _MOST_TOOL_SETS:
            self._tools.popitem(last=False)
        return found

    def find(self, key: bytes) -> Kept | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, kept: Kept) -> None:
        if key in self._entries:
            return
        self._entries[key] = kept
        self._used_tok += int(kept.ids.size)
        while self._used_tok > self._budget_tok and len(self._entries) > 1:
            _, old = self._entries.popitem(last=False)
            self._used_tok -= int(old.ids.size)


class LongPieces:
    """Ids of recent long texts between two added tokens, such as a system prompt with its tools.

    A conversation's first stretch differs from another's in its task only; the rest is encoded
    once. For every thread.
    """

    def __init__(self, budget_chars: int) -> None:
        self._budget_chars = budget_chars
        self._used_chars = 0
        self._entries: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, encode: Callable[[str], np.ndarray]) -> np.ndarray:
        with self._lock:
            found = self._entries.get(text)
            if found is not None:
                self._entries.move_to_end(text)
                return found
        ids = encode(text)
        ids.setflags(write=False)
        with self._lock:
            if text not in self._entries:
                self._entries[text] = ids
                self._used_chars += len(text)
            while self._used_chars > self._budget_chars and len(self._entries) > 1:
                old, _ = self._entries.popitem(last=False)
                self._used_chars -= len(old)
        return ids


class Renderings:
    """The stretches of one episode's history; behind them, those of all episodes."""

    def __init__(self, shared: RenderingCache) -> None:
        self._shared = shared
        self._own: dict[bytes, Kept] = {}

    def get(self, stretch: Stretch, render: Render) -> Kept:
        key = stretch.key
        found = self.find(key)
        return found if found is not None else self.keep(key, render(stretch))

    def find(self, key: bytes) -> Kept | None:
        found = self._own.get(key)
        if found is None:
            found = self._shared.find(key)
            if found is not None:
                self._own[key] = found
        return found

    def keep(self, key: bytes, rendering: Rendering) -> Kept:
        rendering.ids.setflags(write=False)
        kept = Kept(rendering.ids, rendering.dropped_thinking)
        self._own[key] = kept
        self._shared.put(key, kept)
        return kept

"""Stretches of rendered text with their ids, and a memory for recent ones.

Episodes of a group start with the same long text: it is rendered and encoded once.
Invariant: cached ids are read-only, so that no prompt can change another one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rendering:
    """A stretch of environment text."""

    text: str
    ids: np.ndarray  # i32[N]
    dropped_thinking: bool = False  # the template leaves a turn's reasoning out


class RenderingCache:
    """Recent renderings: the episodes of a group start with the same text."""

    def __init__(self, budget_chars: int) -> None:
        self._budget_chars = budget_chars
        self._used_chars = 0
        self._entries: OrderedDict[Hashable, Rendering] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Rendering]) -> Rendering:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = make()
        entry.ids.setflags(write=False)
        self._entries[key] = entry
        self._used_chars += len(entry.text)
        while self._used_chars > self._budget_chars and len(self._entries) > 1:
            _, old = self._entries.popitem(last=False)
            self._used_chars -= len(old.text)
        return entry

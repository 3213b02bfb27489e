"""Which slot holds the keys and values of which tokens: the prefix cache of the native driver.

A finished request leaves its slot filled; a later prompt takes the slot that it extends, or copies
the longest common prefix from another slot (siblings and other episodes share a system prompt).
Least recently used slots are overwritten first. Not here: arrays (`engine`).
Invariant: an entry dies with its weight version; a slot that spans a swap never becomes an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot for a request: copy `prefix_tok` tokens from `source` (maybe itself), prefill on."""

    slot: int
    source: int
    prefix_tok: int


class SlotTable:
    """Single-threaded: only the driver's thread touches it."""

    def __init__(self, slots: int) -> None:
        self._tokens: list[np.ndarray] = [NO_TOKENS] * slots  # i32[n] each, keys and values valid
        self._busy = [False] * slots
        self._used = [0] * slots
        self._clock = 0

    @property
    def free(self) -> int:
        return self._busy.count(False)

    def claim(self, prompt: np.ndarray) -> Claim | None:
        """Takes a free slot for `prompt`; None if every slot is busy.

        At least the prompt's last token is left to be computed: it yields the first logits.
        """
        if not self.free:
            return None
        usable = prompt[:-1]
        common = [_common(tokens, usable) for tokens in self._tokens]
        best = max(range(len(common)), key=lambda s: (common[s], not self._busy[s]))
        free = [s for s in range(len(self._busy)) if not self._busy[s]]
        if not self._busy[best] and common[best] and common[best] == len(self._tokens[best]):
            slot = best  # the prompt extends all that this slot holds
        else:
            slot = min(free, key=lambda s: (len(self._tokens[s]) > 0, self._used[s]))
        claim = Claim(slot, best if common[best] else slot, common[best])
        self._busy[slot] = True
        self._tokens[slot] = NO_TOKENS
        self._touch(slot)
        self._touch(claim.source)
        return claim

    def fill(self, slot: int, tokens: np.ndarray) -> None:
        """The slot's first len(tokens) keys and values are valid now; others may copy them."""
        self._tokens[slot] = tokens

    def release(self, slot: int, tokens: np.ndarray) -> None:
        """The request ended; the slot keeps the keys and values of `tokens`."""
        self._busy[slot] = False
        self._tokens[slot] = tokens
        self._touch(slot)

    def forget(self) -> None:
        """The weights changed: nothing cached is worth anything."""
        self._tokens = [NO_TOKENS] * len(self._tokens)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n

"""Which slot holds the keys and values of which tokens, and which slot a request gets.

A finished request leaves its slot filled; a later prompt takes the slot that it extends, or copies
the longest common prefix from another slot (siblings and other episodes share a system prompt) or
from the cache pool. Least recently used slots are overwritten first; what they held moves to the
pool, where there is one. Not here: arrays (`engine`), pages (`prefix_cache`).
Invariant: an entry dies with its weight version; a slot that spans a swap never becomes an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.serving.prefix_cache import PrefixCache
from clawgym_jax.serving.state import Room

NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot for a request: copy `prefix_tok` tokens from `source` (maybe itself), prefill on."""

    slot: int
    source: int
    prefix_tok: int
    pages: tuple[int, ...] = ()  # not empty: the prefix is in these pages, not in a slot
    lost: np.ndarray = field(
        default_factory=lambda: NO_TOKENS
    )  # i32[n], what the slot held and the pool may keep


class SlotTable:
    """Single-threaded: only the driver's thread touches it."""

    def __init__(self, rooms: Sequence[Room], cache: PrefixCache | None = None) -> None:
        slots = sum(room.slots for room in rooms)
        self._rooms = rooms
        self._cache = cache
        self._tokens: list[np.ndarray] = [NO_TOKENS] * slots  # i32[n] each, keys and values valid
        self._busy = [False] * slots
        self._used = [0] * slots
        self._clock = 0

    @property
    def free(self) -> int:
        return self._busy.count(False)

    def room_of(self, slot: int) -> int:
        return next(i for i, r in enumerate(self._rooms) if slot < r.first + r.slots)

    def choose(self, needs_tok: Sequence[int]) -> list[int]:
        """Which of the waiting requests, in their order, get a slot now.

        A request takes the shortest slot with room for it; a longer one only where nobody who
        waits needs that length.
        """
        free = [len(self._free_in(i)) for i in range(len(self._rooms))]
        wanted = {self._shortest(need) for need in needs_tok}
        chosen = []
        for index, need in enumerate(needs_tok):
            own = self._shortest(need)
            rooms = [i for i in range(own, len(free)) if free[i] and (i == own or i not in wanted)]
            if rooms:
                free[rooms[0]] -= 1
                chosen.append(index)
        return chosen

    def claim(self, prompt: np.ndarray, need_tok: int) -> Claim | None:
        """Takes the shortest free slot that holds `need_tok`, or one of the longest where none
        does; None if there is none.

        At least the prompt's last token is left to be computed: it yields the first logits.
        """
        rooms = range(self._shortest(need_tok), len(self._rooms))
        room = next((i for i in rooms if self._free_in(i)), None)
        if room is None:
            return None
        usable = prompt[:-1]
        common = [common_prefix(tokens, usable) for tokens in self._tokens]
        free = self._free_in(room)
        best = max(range(len(common)), key=lambda s: (common[s], s in free))
        if best in free and common[best] and common[best] == len(self._tokens[best]):
            slot = best  # the prompt extends all that this slot holds
        else:
            slot = min(free, key=lambda s: (len(self._tokens[s]) > 0, self._used[s]))
        claim = self._claim(slot, best, common[best], usable)
        self._busy[slot] = True
        self._tokens[slot] = NO_TOKENS
        self._touch(slot)
        self._touch(claim.source)
        return claim

    def _claim(self, slot: int, best: int, common: int, usable: np.ndarray) -> Claim:
        held = self._tokens[slot]
        if slot == best and common:
            lost = NO_TOKENS if common == held.size else held
        else:
            lost = held
        if self._cache is not None:
            hit = self._cache.find(usable)
            if hit.prefix_tok > common:
                return Claim(slot, slot, hit.prefix_tok, hit.pages, lost)
        return Claim(slot, best if common else slot, common, (), lost)

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
        if self._cache is not None:
            self._cache.forget()

    def _shortest(self, need_tok: int) -> int:
        fitting = [i for i, room in enumerate(self._rooms) if room.tokens >= need_tok]
        return min(fitting, default=len(self._rooms) - 1)

    def _free_in(self, room: int) -> list[int]:
        first, slots, _ = self._rooms[room]
        return [s for s in range(first, first + slots) if not self._busy[s]]

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

"""Moves keys, values and routes so that a slot begins with the prefix that was claimed for it.

What the slot held before goes into the pool, if there is one and it is worth it. Not here: which
slot and prefix a request gets (`slots`), copies within a room where a prefill makes
them (`Engine.copies_first` is off).
Invariant: what is written over was saved first, where it was to be kept.
"""

from __future__ import annotations

from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.prefix_cache import PrefixCache
from clawgym_jax.serving.request import DriverStats
from clawgym_jax.serving.routes import Routes
from clawgym_jax.serving.slots import Claim, SlotTable
from clawgym_jax.serving.state import DecodeState


class Places:
    """The slots of one engine with their pool."""

    def __init__(
        self,
        engine: Engine,
        table: SlotTable,
        cache: PrefixCache | None,
        routes: Routes,
        stats: DriverStats,
    ) -> None:
        self._engine = engine
        self._table = table
        self._cache = cache
        self._routes = routes
        self._stats = stats

    def at_once(self, claim: Claim) -> bool:
        """Whether programs beside the prefill move keys and values for this claim."""
        rooms = {self._table.room_of(slot) for slot in (claim.slot, claim.source)}
        copied = claim.source != claim.slot and self._engine.copies_first
        return copied or bool(claim.pages) or len(rooms) > 1 or self._worth_keeping(claim)

    def place(self, state: DecodeState, claim: Claim) -> DecodeState:
        """Saves what the slot held, and brings the prefix into it."""
        room, slot = self._within(claim.slot)
        source_room, source = self._within(claim.source)
        if self._worth_keeping(claim):
            state = self._save(state, claim)
        if claim.pages:
            state = self._engine.restore(state, room, slot, claim.pages)
            self._routes.restore(claim.slot, claim.pages, claim.prefix_tok)
            self._stats.pooled_tok += claim.prefix_tok
        elif claim.source != claim.slot:
            where = (source_room, source), (room, slot)
            state = self._engine.copy(state, *where, claim.prefix_tok)
            self._routes.copy(claim.source, claim.slot, claim.prefix_tok)
        return state

    def _worth_keeping(self, claim: Claim) -> bool:
        return self._cache is not None and bool(claim.lost.size)

    def _save(self, state: DecodeState, claim: Claim) -> DecodeState:
        assert self._cache is not None
        room, slot = self._within(claim.slot)
        before = self._cache.evicted
        keep = self._cache.keep(claim.lost, spare=claim.pages)
        self._stats.evicted_pages += self._cache.evicted - before
        if keep.pages:
            first, pages = keep.first_page, keep.pages
            state = self._engine.save(state, room, slot, first, pages)
            self._routes.save(claim.slot, first, pages)
        return state

    def _within(self, slot: int) -> tuple[int, int]:
        """(room, number within it)"""
        room = self._table.room_of(slot)
        return room, slot - self._engine.rooms[room].first

"""The experts of every token, kept on the host beside the keys and values in slots and pages.

A token's route is that of its first computation; one that is copied with its keys and values keeps
it. Nothing is kept where the engine does not capture routing.
Invariant: what was not recorded reads as UNKNOWN_EXPERT, never as expert 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from clawgym_jax.serving.engine import UNKNOWN_EXPERT, Engine


class Routes:
    """u8[T, L, K] of every slot, u8[N, page, L, K] of the pool."""

    def __init__(self, engine: Engine) -> None:
        self.on = engine.routing
        if not self.on:
            return
        model, config = engine.model, engine.config
        layers = sum(count for is_moe, count in model.segments if is_moe)
        self._shape = (layers, model.num_experts_per_tok)
        lengths = [room.tokens for room in engine.rooms for _ in range(room.slots)]
        self._slots = [self._unknown(tokens) for tokens in lengths]
        self._page_tok = config.page_tok
        self._pages = self._unknown(config.pages * config.page_tok).reshape(
            config.pages, config.page_tok, *self._shape
        )

    def put(
        self, slot: int, start: int, experts: jax.Array | np.ndarray | None, row: int, count: int
    ) -> None:
        """experts: u8[L, b, P, K] of a prefill; `count` tokens of its row, from `start` on."""
        if self.on and count:
            assert experts is not None
            self._slots[slot][start : start + count] = np.moveaxis(
                np.asarray(experts)[:, row, :count], 0, 1
            )

    def put_step(self, slot: int, at: int, experts: jax.Array | np.ndarray | None) -> None:
        """experts: u8[L, S, K] of a decode step, that fed the token at `at`."""
        if self.on:
            assert experts is not None
            self._slots[slot][at] = np.asarray(experts)[:, slot]

    def copy(self, source: int, target: int, count: int) -> None:
        if self.on:
            self._slots[target][:count] = self._slots[source][:count]

    def save(self, slot: int, first_page: int, pages: Sequence[int]) -> None:
        if self.on:
            for i, page in enumerate(pages, start=first_page):
                self._pages[page] = self._slots[slot][i * self._page_tok :][: self._page_tok]

    def restore(self, slot: int, pages: Sequence[int], count: int) -> None:
        if self.on:
            known = self._pages[list(pages)].reshape(-1, *self._shape)[:count]
            self._slots[slot][:count] = known

    def of(self, slot: int, known: int, total: int) -> np.ndarray | None:
        """u8[total, L, K]: the first `known` tokens of a slot, the rest unknown."""
        if not self.on:
            return None
        out = self._unknown(total)
        out[:known] = self._slots[slot][:known]
        return out

    def _unknown(self, tokens: int) -> np.ndarray:
        return np.full((tokens, *self._shape), UNKNOWN_EXPERT, np.uint8)

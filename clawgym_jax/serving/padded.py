"""Requests as padded arrays for the engine: suffixes to prefill, slots to start and stop.

Not here: which request gets which slot (`batcher`, `slots`), the programs.
Invariant: padding rows of a prefill write to their room's scratch slot.
Axes: see `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clawgym_jax.serving.request import Request
from clawgym_jax.serving.sampling import Knobs
from clawgym_jax.serving.slots import NO_TOKENS
from clawgym_jax.serving.state import Prefill, Room, Rows


class Suffix(NamedTuple):
    """What one row of a prefill computes."""

    slot: int
    source: int
    start: int
    tokens: np.ndarray  # i32[n]
    targets: np.ndarray = NO_TOKENS  # i32[n] when scoring
    temperature: float = 1.0

    def first(self, size: int) -> Suffix:
        """At most `size` tokens of it."""
        return self._replace(tokens=self.tokens[:size], targets=self.targets[:size])


def suffixes(rows: Sequence[Suffix], b: int, size: int, room: Room) -> Prefill:
    """Slots are counted within the room; at most b rows of at most `size` tokens."""
    batch = Prefill(
        tokens=np.zeros((b, size), np.int32),
        slots=np.full(b, room.slots, np.int32),
        sources=np.full(b, room.slots, np.int32),
        starts=np.zeros(b, np.int32),
        targets=np.zeros((b, size), np.int32),
        temperature=np.ones(b, np.float32),
    )
    for i, row in enumerate(rows):
        batch.tokens[i, : len(row.tokens)] = row.tokens
        batch.slots[i], batch.sources[i] = row.slot - room.first, row.source - room.first
        batch.starts[i] = row.start
        batch.targets[i, : len(row.targets)] = row.targets
        batch.temperature[i] = row.temperature
    return batch


def unfilled(r: Request) -> Suffix:
    """What is left of a prompt; its last token is fed by the first step."""
    source = r.source if r.source >= 0 else r.slot
    return Suffix(r.slot, source, r.filled_tok, r.prompt[r.filled_tok : -1])


def forced(r: Request) -> Suffix:
    """What a request is still to be scored for."""
    at, ids = len(r.ids), r.targets
    fed = np.concatenate([r.prompt[-1:], ids[:-1]])[at:]
    return Suffix(r.slot, r.slot, len(r.prompt) - 1 + at, fed, ids[at:], r.params.temperature)


def starting(slots: int, requests: Sequence[Request]) -> Rows:
    """Their prompts are in, but for the last token, which is fed first."""
    rows = _empty(slots)
    for r in requests:
        s, p = r.slot, r.params
        rows.mask[s], rows.active[s] = True, True
        rows.length[s], rows.last[s] = len(r.prompt) - 1, r.prompt[-1]
        rows.knobs.temperature[s], rows.knobs.top_p[s] = p.temperature, p.top_p
        rows.knobs.top_k[s], rows.knobs.min_p[s] = p.top_k, p.min_p
        rows.knobs.seed[s] = p.seed & 0xFFFFFFFF
    return rows


def stopping(slots: int, which: Sequence[int]) -> Rows:
    rows = _empty(slots)
    rows.mask[list(which)] = True
    return rows


def _empty(slots: int) -> Rows:
    return Rows(
        mask=np.zeros(slots, bool),
        length=np.zeros(slots, np.int32),
        last=np.zeros(slots, np.int32),
        active=np.zeros(slots, bool),
        knobs=Knobs(
            temperature=np.ones(slots, np.float32),
            top_p=np.ones(slots, np.float32),
            top_k=np.zeros(slots, np.int32),
            min_p=np.zeros(slots, np.float32),
            seed=np.zeros(slots, np.uint32),
            step=np.zeros(slots, np.int32),
        ),
    )

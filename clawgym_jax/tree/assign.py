"""Which pieces go into one row: best fit, counting what the row holds already.

Pieces come largest first; each goes to the row where it adds the fewest tokens, then to the one
where the least room is left, else to a new row.
Not here: how pieces are cut (`cut`), arrays (`rows`).
Invariant: no row holds more than row_tok tokens or train_tok trainable ones; the sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.tree.cut import Piece


@dataclass(frozen=True, slots=True)
class FilledRow:
    """The pieces of one row."""

    pieces: tuple[Piece, ...]
    tree_tok: int
    train_tok: int


@dataclass(slots=True)
class _Open:
    """A row being filled."""

    pieces: list[Piece] = field(default_factory=list)
    held: set[tuple[int, int]] = field(default_factory=set)  # shared segments, (forest, segment)


def assign(pieces: Sequence[Piece], row_tok: int, train_tok: int) -> list[FilledRow]:
    """Time: for each piece, one vector operation over the open rows and one per shared segment."""
    rows: list[_Open] = []
    used = np.zeros(len(pieces), np.int64)  # i64[R], tokens in each open row
    trained = np.zeros(len(pieces), np.int64)  # i64[R]
    holders: dict[tuple[int, int], list[int]] = {}  # shared segment -> rows that hold it
    for piece in sorted(pieces, key=lambda piece: -piece.tree_tok):
        added = np.full(len(rows), piece.tree_tok, np.int64)
        for segment, size in piece.shared.items():
            added[holders.get((piece.forest, segment), [])] -= size
        room = row_tok - used[: len(rows)] - added
        fits = (room >= 0) & (trained[: len(rows)] + piece.train_tok <= train_tok)
        if fits.any():
            key = np.where(fits, added * (row_tok + 1) + room, np.iinfo(np.int64).max)
            row = int(key.argmin())
            used[row] += added[row]
        else:
            row = len(rows)
            rows.append(_Open())
            used[row] = piece.tree_tok
        trained[row] += piece.train_tok
        rows[row].pieces.append(piece)
        for segment in piece.shared:
            if (piece.forest, segment) not in rows[row].held:
                rows[row].held.add((piece.forest, segment))
                holders.setdefault((piece.forest, segment), []).append(row)
    return [
        FilledRow(tuple(row.pieces), int(used[r]), int(trained[r])) for r, row in enumerate(rows)
    ]

"""Packed rows: the arrays that a batch is made of.

Not here: which calls share a row (`pack`); weights, advantages, log-probs (`batch.tree_batch`).
Invariant (packing ledger): rows x length = unique + repeated ancestors + padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.flatten import NO_PRED, flatten
from clawgym_jax.tree.forest import Forest


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of one shape. Padding: end = j + 1, first = -1, mask False, pred = NO_PRED, call = -1.

    The rows of one pack may come in several of these (buckets); the counts then add up over them.
    """

    tokens: np.ndarray  # i32[R, N]
    position: np.ndarray  # i32[R, N]
    end: np.ndarray  # i32[R, N]
    first: np.ndarray  # i32[R, N], the call in `calls` that first computed this token, among those
    # of its row that share context with it; `position` is the token's index in prompt + completion
    target: np.ndarray  # i32[R, K], index into the row
    pred: np.ndarray  # i32[R, K], index into the row
    mask: np.ndarray  # bool[R, K], True at trainable tokens
    rollout: np.ndarray  # i32[R, K], number of the rollout in the batch, -1 at padding
    call: np.ndarray  # i32[R, K], number of the call in `calls`, -1 at padding
    offset: np.ndarray  # i32[R, K], index in that call's completion
    calls: tuple[CallRecord, ...]  # every call that is trained here
    unique_tok: int  # tokens in the rows that stand there for the first time
    repeated_tok: int  # ancestors repeated because their tree was cut or spread over rows
    linear_tok: int  # what one row per call would have held (prompt + completion of each)

    @property
    def padding_tok(self) -> int:
        return int(self.tokens.size) - self.unique_tok - self.repeated_tok

    @property
    def sharing(self) -> float:
        """How many times more tokens one row per call would hold; 1 where nothing is shared."""
        return self.linear_tok / max(self.unique_tok + self.repeated_tok, 1) if self.calls else 1.0


def fill_rows(
    rows: Sequence[Sequence[Forest]], row_tok: int, train_tok: int, unique_tok: int
) -> PackedRows:
    """rows: the forests of each row, which see nothing of each other. They fit (checked before)."""
    shape_n, shape_k = (len(rows), row_tok), (len(rows), train_tok)
    tokens, position = np.zeros(shape_n, np.int32), np.zeros(shape_n, np.int32)
    end = np.tile(np.arange(1, row_tok + 1, dtype=np.int32), (len(rows), 1))
    first = np.full(shape_n, -1, np.int32)
    target, offset = np.zeros(shape_k, np.int32), np.zeros(shape_k, np.int32)
    pred, rollout, call = (np.full(shape_k, NO_PRED, np.int32) for _ in range(3))
    mask = np.zeros(shape_k, bool)
    calls: list[CallRecord] = []
    for r, forests in enumerate(rows):
        at_n = at_k = 0
        for forest in forests:
            flat = flatten(forest)
            n, k = len(flat.tokens), len(flat.target)
            slots_n, slots_k = slice(at_n, at_n + n), slice(at_k, at_k + k)
            tokens[r, slots_n], position[r, slots_n] = flat.tokens, flat.position
            end[r, slots_n], first[r, slots_n] = flat.end + at_n, flat.first + len(calls)
            target[r, slots_k] = flat.target + at_n
            pred[r, slots_k] = np.where(flat.pred == NO_PRED, NO_PRED, flat.pred + at_n)
            rollout[r, slots_k] = np.asarray(forest.rollout, np.int32)[flat.call]
            call[r, slots_k] = flat.call + len(calls)
            offset[r, slots_k], mask[r, slots_k] = flat.offset, True
            calls.extend(forest.calls)
            at_n, at_k = at_n + n, at_k + k
    used = sum(forest.total_tok for forests in rows for forest in forests)
    return PackedRows(
        tokens, position, end, first, target, pred, mask, rollout, call, offset, tuple(calls),
        unique_tok=unique_tok,
        repeated_tok=used - unique_tok,
        linear_tok=sum(c.prompt_tok + c.completion_tok for c in calls),
    )  # fmt: skip

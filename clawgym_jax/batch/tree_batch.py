"""The arrays of one training step: packed rows plus what each trainable token needs.

Everything about the loss is indexed by trainable token [R, K], never by context token.
Not here: where the numbers come from (`from_episodes`).
Invariant: a padded row or slot has mask False and weight 0 and contributes exactly nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Array = Any  # numpy on the host, jax inside a program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBatch:
    """R rows of N tokens with K trainable slots each."""

    tokens: Array  # i32[R, N]
    position: Array  # i32[R, N], depth on the path
    end: Array  # i32[R, N], exclusive depth-first end; j + 1 at padding
    target: Array  # i32[R, K], the trainable token's id
    pred: Array  # i32[R, K], row index of the token before it on its path, -1 at padding
    mask: Array  # bool[R, K]
    weight: Array  # f32[R, K], W of the tree loss, 0 at padding
    advantage: Array  # f32[R, K]
    rollout_logprobs: Array  # f32[R, K], as the engine sampled them
    old_logprobs: Array  # f32[R, K], by the training engine before the update
    temperature: Array  # f32[R, K], of the call that sampled the token

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    def replace(self, **changes: Array) -> TreeBatch:
        return dataclasses.replace(self, **changes)

    def rows_between(self, start: int, stop: int) -> TreeBatch:
        return jax.tree.map(lambda x: x[start:stop], self)  # type: ignore[no-any-return]

    def padded(self, rows: int) -> TreeBatch:
        """With empty rows behind, `rows` in all."""
        extra = rows - self.rows
        if extra < 0:
            raise ValueError(f"cannot pad {self.rows} rows to {rows}: expected at least as many")
        if extra == 0:
            return self
        n = self.tokens.shape[1]
        fill = {"end": np.arange(1, n + 1), "pred": np.int32(-1), "temperature": np.float32(1)}
        columns = {}
        for field in dataclasses.fields(self):
            old = np.asarray(getattr(self, field.name))
            new = np.zeros((extra, *old.shape[1:]), old.dtype) + fill.get(field.name, 0)
            columns[field.name] = np.concatenate([old, new.astype(old.dtype)])
        return TreeBatch(**columns)

    def micro(self, rows: int) -> Iterator[TreeBatch]:
        """Blocks of exactly `rows` rows, the last one padded."""
        whole = self.padded(-(-self.rows // rows) * rows)
        for start in range(0, whole.rows, rows):
            yield whole.rows_between(start, start + rows)

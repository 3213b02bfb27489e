"""The arrays of one training step: packed rows plus what each trainable token needs.

Everything about the loss is indexed by trainable token [R, K]; only what belongs to a packed token
itself (its id, place, route, share in the load-balance loss) is indexed by context token [R, N].
Not here: where the numbers come from (`fill`, `scored`).
Invariant: a padded row or slot has mask False and weight 0 and contributes exactly nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from clawgym_jax.batch.call_tree import RolloutCalls
from clawgym_jax.tree.pack import PackedRows

Array = Any  # numpy on the host, jax inside a program
UNKNOWN_ROUTE = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeBatch:
    """R rows of N tokens with K trainable slots each."""

    tokens: Array  # i32[R, N]
    position: Array  # i32[R, N], depth on the path
    end: Array  # i32[R, N], exclusive depth-first end; j + 1 at padding
    balance: Array  # f32[R, N], sum of `weight` over the trainable tokens that this one predicts
    target: Array  # i32[R, K], the trainable token's id
    pred: Array  # i32[R, K], row index of the token before it on its path, -1 at padding
    mask: Array  # bool[R, K]
    weight: Array  # f32[R, K], W of the tree loss, 0 at padding
    advantage: Array  # f32[R, K]
    rollout_logprobs: Array  # f32[R, K], as the engine sampled them
    old_logprobs: Array  # f32[R, K], by the training engine before the update
    ref_logprobs: Array  # f32[R, K], by the reference model; 0 where unused
    correction: Array  # f32[R, K], rollout correction, a constant of the loss; 1 = none
    old_values: Array  # f32[R, K], V at `pred` before the update; 0 where unused
    returns: Array  # f32[R, K], what V at `pred` is trained towards; 0 where unused
    temperature: Array  # f32[R, K], of the call that sampled the token
    routes: Array | None = None  # i16[R, L, N, k] experts to replay, -1 = free; None = no replay

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
        fill = {
            "end": np.arange(1, self.tokens.shape[1] + 1),
            "pred": np.int32(-1),
            "temperature": np.float32(1),
            "correction": np.float32(1),
            "routes": np.int16(UNKNOWN_ROUTE),
        }
        columns: dict[str, Array] = {}
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                continue
            old = np.asarray(getattr(self, field.name))
            new = np.zeros((extra, *old.shape[1:]), old.dtype) + fill.get(field.name, 0)
            columns[field.name] = np.concatenate([old, new.astype(old.dtype)])
        return TreeBatch(**columns)

    def micro(self, rows: int) -> Iterator[TreeBatch]:
        """Blocks of exactly `rows` rows, the last one padded."""
        whole = self.padded(-(-self.rows // rows) * rows)
        for start in range(0, whole.rows, rows):
            yield whole.rows_between(start, start + rows)


@dataclass(frozen=True)
class Part:
    """The rows of one length. `arrays` is what programs read, the rest says whose tokens they are.

    rollouts: of the whole minibatch, the same in all its parts; `rows.rollout` counts in it.
    """

    rows: PackedRows
    arrays: TreeBatch
    rollouts: tuple[RolloutCalls, ...] = ()

    def replace(self, **changes: Array) -> Part:
        """With other columns of `arrays`."""
        return dataclasses.replace(self, arrays=self.arrays.replace(**changes))


Minibatch = tuple[Part, ...]  # of one optimiser step, ascending by row length

"""Padding and micro-steps: empty rows are nothing, with and without routes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from clawgym_jax.batch.from_episodes import BatchConfig, build_batch
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.tree.pack import PackConfig
from tests.batch.episodes import simple


def batch(routes: bool) -> TreeBatch:
    config = BatchConfig(PackConfig(row_tok=16, train_tok=6, share_context=False))
    episodes = [simple(f"e{i}", float(i), 4) for i in range(3)]
    (parts,), _ = build_batch(episodes, config)
    whole = parts[-1].arrays
    shape = (whole.rows, 2, whole.tokens.shape[1], 2)
    return whole.replace(routes=np.ones(shape, np.int16) if routes else None)


@pytest.mark.parametrize("routes", [True, False])
def test_padded_rows_are_nothing(routes: bool) -> None:
    whole = batch(routes)
    longer = whole.padded(whole.rows + 2)
    empty = longer.rows_between(whole.rows, longer.rows)
    assert not empty.mask.any()
    for name in ("weight", "balance", "advantage", "tokens", "returns", "old_values"):
        assert not getattr(empty, name).any()
    np.testing.assert_array_equal(empty.end, np.tile(np.arange(1, 17), (2, 1)))
    assert (empty.pred == -1).all()
    assert (empty.temperature == 1).all()
    assert (empty.correction == 1).all()
    assert (empty.routes == -1).all() if routes else empty.routes is None
    for one, other in zip(
        jax.tree.leaves(whole), jax.tree.leaves(longer.rows_between(0, whole.rows)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("routes", [True, False])
def test_micro_steps_hold_every_row_once(routes: bool) -> None:
    whole = batch(routes)
    pieces = list(whole.micro(2))
    assert {p.rows for p in pieces} == {2}
    for field in dataclasses.fields(TreeBatch):
        if getattr(whole, field.name) is not None:
            together = np.concatenate([getattr(p, field.name) for p in pieces])[: whole.rows]
            np.testing.assert_array_equal(together, getattr(whole, field.name))
    assert sum(int(p.mask.sum()) for p in pieces) == int(whole.mask.sum()) == 12


def test_rows_cannot_be_cut_by_padding() -> None:
    with pytest.raises(ValueError, match="at least as many"):
        batch(False).padded(0)

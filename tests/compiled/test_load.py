"""The made-up load is what it says, and what is counted of it is right."""

from __future__ import annotations

import numpy as np
import pytest

from clawgym_jax.compiled.load import group_sizes, plan_for, row_end, used_tok, visited_rows
from clawgym_jax.model.attention import tree_mask
from clawgym_jax.model.live_blocks import count_pairs


def test_a_row_is_one_tree_with_its_rollouts_apart() -> None:
    plan = plan_for(512)  # prompt 64, rollouts of 64 with branches of 8
    end = row_end(512, plan)
    mask = np.asarray(tree_mask(end[None]))[0]
    rollout = plan.rollout_tok + plan.branch_tok
    first, second = plan.prompt_tok + np.arange(2) * rollout
    assert mask[second, : plan.prompt_tok].all()  # the prompt is seen
    assert not mask[second, first : first + rollout].any()  # the other rollout is not
    fork = first + plan.rollout_tok // 2
    after = fork + plan.branch_tok
    assert mask[after, first:fork].all() and not mask[after, fork:after].any()
    assert used_tok(end) == plan.prompt_tok + 6 * rollout
    assert count_pairs(end, 64, 64).token_pairs == mask.sum()


def test_padding_is_not_used() -> None:
    assert used_tok(np.arange(1, 9, dtype=np.int32)) == 0
    assert used_tok(np.array([4, 4, 4, 4, 5, 6], np.int32)) == 4


@pytest.mark.parametrize("tile", [1, 8, 64])
def test_visited_rows_against_marking_tiles_one_by_one(tile: int) -> None:
    sizes = np.concatenate([group_sizes(999, 16, seed=3), [0, 5]])
    visited, start = 0, 0
    for size in sizes:
        visited += len({row // tile for row in range(start, start + size)}) * tile
        start += size
    assert visited_rows(sizes, tile) == visited
    assert visited_rows(sizes, 1) == sizes.sum()

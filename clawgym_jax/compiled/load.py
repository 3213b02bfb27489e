"""A made-up but typical load: what a packed row looks like, and how tokens spread over experts.

A compiled program's work depends on its data in two places: which block pairs of a tree hold
attention, and how the groups of the grouped products fall into tiles. Both are counted for this
load, which is stated wherever the counts are. Invariant: the same arguments give the same load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Trees of one kind in a row: a prompt shared by rollouts, each a chain with one branch."""

    prompt_tok: int
    rollout_tok: int
    branch_tok: int  # hangs at the middle of a rollout: what a sub-agent or an edit leaves

    def describe(self) -> str:
        return (
            f"a prompt of {self.prompt_tok} tokens shared by rollouts of {self.rollout_tok}, each "
            f"with a branch of {self.branch_tok} at its middle"
        )


def plan_for(row_tok: int) -> RowPlan:
    """An eighth for the prompt, six rollouts with it; sizes in proportion to the row."""
    return RowPlan(row_tok // 8, row_tok // 8, row_tok // 64)


def row_end(row_tok: int, plan: RowPlan) -> np.ndarray:
    """`end` i32[N] of a row: the shared prompt, then as many rollouts as fit, then padding."""
    end = np.arange(1, row_tok + 1, dtype=np.int32)
    at = plan.prompt_tok
    while at + plan.rollout_tok + plan.branch_tok <= row_tok:
        half = plan.rollout_tok // 2
        fork = at + half
        branch = fork + plan.branch_tok
        stop = branch + plan.rollout_tok - half
        end[at:fork] = stop  # seen by the branch and by the second half
        end[fork:branch] = branch
        end[branch:stop] = stop
        at = stop
    end[: plan.prompt_tok] = at
    return end


def used_tok(end: np.ndarray) -> int:
    """Tokens of the row up to the end of its last tree; lone tokens behind it are padding."""
    shared = end[end > np.arange(1, len(end) + 1)]
    return int(shared.max(initial=0))


def group_sizes(rows: int, experts: int, seed: int = 0) -> np.ndarray:
    """i32[experts]: an even router's draw."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(rows, np.full(experts, 1.0 / experts)).astype(np.int32)


def visited_rows(sizes: np.ndarray, tile: int) -> int:
    """Rows that a grouped product computes: whole tiles, those at a border once for each group."""
    stop = np.cumsum(sizes)
    start = stop - sizes
    tiles = np.where(sizes > 0, -(-stop // tile) - start // tile, 0)
    return int(tiles.sum()) * tile

"""GRPO on a batch of real harness episodes, and what it did to good and bad turns.

Several optimiser steps on one batch: at a context far beyond what the tiny model was trained on,
the first step mostly teaches it to speak in tool calls at all, failed ones too; then the clipped
ratio stops what has risen enough, and what must fall, falls.

All rollouts go into as few rows as possible: what they share, system prompt and tools above all,
is computed once. The row is the smallest bucket that holds them. Not here: rollouts (`stage`).
Invariant: log-probs before and after are of the same tokens, by the same program.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.batch.from_episodes import BatchReport, build_batch
from clawgym_jax.batch.scored import set_old
from clawgym_jax.batch.tree_batch import Part, TreeBatch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Episode
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.state import OptimConfig, TrainState, init_state, make_optimizer
from clawgym_jax.train.step import TrainStep, logprob_check
from clawgym_jax.tree.pack import PackConfig

ROW_BUCKETS = (4096, 8192, 12_288, 16_384, 20_480, 24_576, 32_768, 49_152, 57_344, 65_536)
TRAIN_BUCKETS = (1024, 2048, 4096, 8192)
UPDATES = 3
OPTIMIZER = OptimConfig(learning_rate=3e-4, weight_decay=0.0, grad_clip=1.0)


@dataclass(frozen=True)
class Lesson:
    """What an update was made of and what it did. Changes: per token, weighted as in the loss."""

    grad_norm: float  # of the first update
    updates: int
    logprob_gap_max: float  # the engine's against the trainer's, before the update
    good_logprob_change: float  # of turns whose rollout beat its group
    bad_logprob_change: float  # of turns whose rollout fell behind its group
    trained_tok: int
    dropped_tok: dict[str, int]
    rollouts: dict[str, int]  # in the loss, or why not
    row_tok: int
    rows: int
    tree_tok: int  # tokens after sharing; one row per call would hold `linear_tok`
    linear_tok: int
    seconds: dict[str, float]


class Teacher:
    """Holds the training state of one run."""

    def __init__(self, graphdef: Any, params: Any) -> None:
        self._optimizer = make_optimizer(OPTIMIZER)
        self.state: TrainState = init_state(params, self._optimizer)
        self._programs = TrainStep(
            graphdef, self._optimizer, LossConfig(attention="blocked"), micro_rows=1
        )

    def teach(self, episodes: Sequence[Episode]) -> Lesson:
        """Old log-probs, the updates, new log-probs."""
        part, report = _packed(episodes)
        seconds: dict[str, float] = {}
        started_s = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal started_s
            now_s = time.perf_counter()
            seconds[name], started_s = now_s - started_s, now_s

        before = self._programs.logprobs(self.state.params, part.arrays)
        ((part,), _) = set_old((part,), [before], BatchConfig())
        batch = part.arrays
        lap("old_logprobs")
        norms = []
        for _ in range(UPDATES):
            self.state, metrics = self._programs.update(self.state, [batch])
            norms.append(metrics["grad_norm"])
        lap("updates")
        after = self._programs.logprobs(self.state.params, batch)
        lap("new_logprobs")
        return Lesson(
            grad_norm=norms[0],
            updates=len(norms),
            logprob_gap_max=logprob_check(batch)["logprob_gap_max"],
            good_logprob_change=_change(batch, after, batch.advantage > 0),
            bad_logprob_change=_change(batch, after, batch.advantage < 0),
            trained_tok=report.ledger.trained_tok,
            dropped_tok=dict(report.ledger.dropped_tok),
            rollouts=dict(report.rollouts),
            row_tok=int(batch.tokens.shape[1]),
            rows=batch.rows,
            tree_tok=report.unique_tok,
            linear_tok=report.linear_tok,
            seconds=seconds,
        )


def _packed(episodes: Sequence[Episode]) -> tuple[Part, BatchReport]:
    """The episodes in the smallest row that holds them all, if one does."""
    most = PackConfig(row_tok=ROW_BUCKETS[-1], train_tok=TRAIN_BUCKETS[-1])
    _, report = build_batch(episodes, BatchConfig(pack=most))
    if not report.ledger.trained_tok:
        raise ConfigError(
            f"nothing to train on in {len(episodes)} episodes: {dict(report.rollouts)}, dropped "
            f"{dict(report.ledger.dropped_tok)}; expected graded rollouts with sampled tokens"
        )
    config = PackConfig(
        row_tok=_bucket(ROW_BUCKETS, report.unique_tok),
        train_tok=_bucket(TRAIN_BUCKETS, report.ledger.trained_tok),
    )
    (batch,), report = build_batch(episodes, BatchConfig(pack=config))
    return batch[0], report


def _bucket(buckets: Sequence[int], needed: int) -> int:
    return min((bucket for bucket in buckets if bucket >= needed), default=buckets[-1])


def _change(batch: TreeBatch, after: np.ndarray, chosen: np.ndarray) -> float:
    """Weighted mean of new - old log-prob over the chosen trainable tokens; 0 if there are none."""
    weight = np.where(batch.mask & chosen, batch.weight, 0.0)
    total = float(weight.sum())
    return float((weight * (after - batch.old_logprobs)).sum()) / total if total else 0.0

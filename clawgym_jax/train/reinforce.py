"""One reinforcement-learning step: graded episodes in, new weights and a page of numbers out.

    episodes -> batch (ledger closed) -> old log-probs -> log-prob check -> updates

Not here: rollouts, checkpoints, the order of steps (`loop`).
Invariant: given the same state and episodes, the new state is the same bit for bit (CPU).
Source: ClawGym II, GRPO on prefix trees.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clawgym_jax.batch.from_episodes import BatchConfig, BatchReport, build_batch
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError, LogprobError
from clawgym_jax.core.types import Episode, Outcome
from clawgym_jax.train.state import TrainState
from clawgym_jax.train.step import TrainStep, logprob_check

PERMUTED = "permuted"


@dataclass(frozen=True)
class ReinforceConfig:
    """How a step's episodes are used."""

    minibatches: int = 1  # optimiser steps per batch, whole groups each
    epochs: int = 1
    max_logprob_gap: float = 1e-4  # engine against trainer, on policy in fp32; 0 = report only
    rewards: str = "graded"  # "permuted" = the control: shuffled among all rollouts of a step

    def __post_init__(self) -> None:
        if self.rewards not in ("graded", PERMUTED):
            raise ConfigError(
                f'reinforce.rewards: expected "graded" or "permuted", got {self.rewards!r}'
            )
        if self.minibatches < 1 or self.epochs < 1:
            raise ConfigError("reinforce.minibatches and epochs: expected at least 1 each")


def reinforce(
    state: TrainState,
    programs: TrainStep,
    episodes: Sequence[Episode],
    batch_config: BatchConfig,
    config: ReinforceConfig,
    seed: int,
) -> tuple[TrainState, dict[str, Any]]:
    """Raises LedgerError or LogprobError where tokens or log-probs do not agree."""
    clock = _Stopwatch()
    used = _permuted(episodes, seed) if config.rewards == PERMUTED else list(episodes)
    batches, report = build_batch(used, batch_config, config.minibatches, seed)
    clock.lap("pack_s")
    batches = [b.replace(old_logprobs=programs.old_logprobs(state.params, b)) for b in batches]
    clock.lap("old_logprobs_s")
    gap = _check(batches, config.max_logprob_gap)
    updates = []
    for _ in range(config.epochs):
        for batch in batches:
            if batch.mask.any():
                state, metrics = programs.update(state, batch)
                updates.append(metrics)
    clock.lap("update_s")
    return state, {**gap, **_means(updates), **_counts(episodes, report), **clock.seconds}


def _check(batches: Sequence[TreeBatch], limit: float) -> dict[str, float]:
    gaps = [logprob_check(batch) for batch in batches]
    worst = max((g["logprob_gap_max"] for g in gaps), default=0.0)
    if limit and worst > limit:
        raise LogprobError(
            f"the engine's and the trainer's log-probs differ by {worst:.2e}, expected at most "
            f"{limit:.0e}: a splice, an offset or stale keys and values; compare "
            "episodes with launch/report.py --calls before training on them"
        )
    mean = float(np.mean([g["logprob_gap_mean"] for g in gaps])) if gaps else 0.0
    return {"logprob_gap_max": worst, "logprob_gap_mean": mean}


def _means(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the step's updates, token counts summed."""
    if not updates:
        return {"updates": 0.0}
    out = {name: float(np.mean([u[name] for u in updates])) for name in updates[0]}
    out["trained_tok"] = float(sum(u["trained_tok"] for u in updates))
    out["updates"] = float(len(updates))
    return out


def _counts(episodes: Sequence[Episode], report: BatchReport) -> dict[str, Any]:
    """Everything that a person looks for when a run misbehaves."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    out: dict[str, Any] = {
        "episodes": len(episodes),
        "reward_mean": float(np.mean(rewards)) if rewards else float("nan"),
        "calls_mean": float(np.mean([len(e.calls) for e in episodes])) if episodes else 0.0,
        "sampled_tok": report.ledger.sampled_tok,
        "tree_tok": report.unique_tok,
        "repeated_tok": report.repeated_tok,
        "padding_tok": report.padding_tok,
        "linear_tok": report.linear_tok,
        "rows": report.rows,
    }
    for harness in sorted({e.record.harness for e in episodes}):
        own = [e.reward for e in episodes if e.record.harness == harness and e.reward is not None]
        out[f"reward/{harness}"] = float(np.mean(own)) if own else float("nan")
    for outcome in Outcome:
        out[f"outcome/{outcome}"] = sum(e.record.outcome is outcome for e in episodes)
    out |= {f"rollouts/{reason}": n for reason, n in sorted(report.rollouts.items())}
    out |= {f"dropped_tok/{why}": n for why, n in sorted(report.ledger.dropped_tok.items())}
    out |= {f"groups/{name}": n for name, n in sorted(report.groups.items())}
    return out


def _permuted(episodes: Sequence[Episode], seed: int) -> list[Episode]:
    """The control: grades dealt out at random, so that nothing can be learned from them."""
    grades = [e.record.grade for e in episodes]
    random.Random(f"permute/{seed}").shuffle(grades)
    return [
        dataclasses.replace(e, record=dataclasses.replace(e.record, grade=grade))
        for e, grade in zip(episodes, grades, strict=True)
    ]


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

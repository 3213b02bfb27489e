"""Supervised learning on recorded episodes: the cold start.

The rows, the programs and the log are those of reinforcement learning; only the loss differs (log
p of the demonstrated tokens). Not here: who demonstrates (`rollout.demonstrator`).
Invariant: the batch of an update is a function of (seed, update), so a resumed run repeats it.
Source: ClawGym II, light cold start before the OpenClaw runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.batch.config import TOKEN_MEAN, BatchConfig
from clawgym_jax.batch.from_episodes import build_sft_batch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Episode
from clawgym_jax.train.state import OptimConfig, TrainState
from clawgym_jax.train.step import TrainStep
from clawgym_jax.tree.filters import FilterConfig, select_calls


@dataclass(frozen=True)
class ColdStartConfig:
    """Off with updates = 0. Paper settings: lr 1e-5, 3 epochs, batch 128, score >= 0.5."""

    demonstrations: int = 0  # episodes per harness
    updates: int = 0
    rollouts_per_update: int = 32
    min_reward: float = 0.5
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    def __post_init__(self) -> None:
        if min(self.demonstrations, self.updates) < 0 or self.rollouts_per_update < 1:
            raise ConfigError(
                "cold_start: expected demonstrations >= 0, updates >= 0, rollouts_per_update >= 1, "
                f"got {self.demonstrations}, {self.updates}, {self.rollouts_per_update}"
            )


def train_supervised(
    state: TrainState,
    programs: TrainStep,
    episodes: Sequence[Episode],
    batch_config: BatchConfig,
    config: ColdStartConfig,
    seed: int,
    on_update: Callable[[int, TrainState, dict[str, float]], None],
    start: int = 0,
) -> TrainState:
    """Runs updates `start` to `config.updates`; `on_update` sees (updates done, state, metrics)."""
    good = [e for e in episodes if e.reward is not None and e.reward >= config.min_reward]
    usable = [e for e in good if _has_tokens(e, batch_config.filters)]
    if not usable:
        raise ConfigError(
            f"no demonstration can be learned from: of {len(episodes)} episodes {len(good)} "
            f"reached a reward of {config.min_reward}, none of them has a trainable token; lower "
            "cold_start.min_reward, or look at batch.filters and episodes.log"
        )
    shared = BatchConfig(batch_config.pack, batch_config.filters, weighting=TOKEN_MEAN)
    for update in range(start, config.updates):
        begin_s = time.perf_counter()
        chosen = [usable[i] for i in _choice(len(usable), config, seed, update)]
        batch, report = build_sft_batch(chosen, shared)
        state, metrics = programs.update(state, [part.arrays for part in batch])
        metrics |= {
            "seconds": time.perf_counter() - begin_s,
            "unique_tok": report.unique_tok,
            "linear_tok": report.linear_tok,
        }
        on_update(update + 1, state, metrics)
    return state


def _has_tokens(episode: Episode, filters: FilterConfig) -> bool:
    """An update on nothing would still move weights: by momentum and decay."""
    return bool(select_calls(episode.calls, filters).kept)


def _choice(n: int, config: ColdStartConfig, seed: int, update: int) -> list[int]:
    """Indices of one update: consecutive pieces of a fresh shuffle per epoch."""
    size = min(config.rollouts_per_update, n)
    per_epoch = max(n // size, 1)
    epoch, piece = divmod(update, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return [int(i) for i in order[piece * size : (piece + 1) * size]]

"""Episodes with rewards -> selected calls -> advantages -> packed rows -> minibatches.

Not here: the loss itself (`losses`), the model, what needs a model (`scored`). The token ledger is
closed here, on every batch.
Invariant: the weights W are fixed over a whole minibatch before rows are split into micro-steps.
Source: ClawGym II, GRPO and PPO objectives; the weights W_v of the shared tree-loss law.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.batch.call_tree import RolloutCalls, rollout_calls
from clawgym_jax.batch.config import (
    GRPO,
    PATH_SUM,
    PPO,
    ROLLOUT_MEAN,
    TOKEN_MEAN,
    BatchConfig,
)
from clawgym_jax.batch.fill import at_calls, at_rollouts, fill
from clawgym_jax.batch.ledger import SampledLedger, check_ledger
from clawgym_jax.batch.routes import route_disagreement, route_shape, routes_of
from clawgym_jax.batch.scored import auxiliary
from clawgym_jax.batch.tree_batch import Minibatch, Part
from clawgym_jax.core.types import Episode
from clawgym_jax.losses.advantage import GroupAdvantages, group_advantages, ungraded
from clawgym_jax.tree.filters import OVER_BRANCHING, Selection, select_calls
from clawgym_jax.tree.pack import PackedRows, pack

__all__ = [
    "GRPO", "PATH_SUM", "PPO", "ROLLOUT_MEAN", "TOKEN_MEAN",
    "BatchConfig", "BatchReport", "build_batch", "build_sft_batch",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of every rollout and token, for the metrics."""

    rollouts: Counter[str]  # in the loss, or the reason why not
    ledger: SampledLedger
    unique_tok: int
    repeated_tok: int
    padding_tok: int
    linear_tok: int  # one row per call would have held this many
    rows: int
    groups: Counter[str]
    route_disagreement: float = 0.0  # `routes.route_disagreement`; 0 where replay is off


def build_batch(
    episodes: Sequence[Episode], config: BatchConfig, minibatches: int = 1, seed: int = 0
) -> tuple[list[Minibatch], BatchReport]:
    """The minibatches of one reinforcement-learning step. Groups are `record.group_id`.

    GRPO: advantages are those of the whole batch; whole groups are dealt to `minibatches` optimiser
    steps. PPO: rollouts are dealt one by one; advantages come with `scored.set_values`. |B| and Z
    are those of a minibatch.
    """
    selections = [select_calls(episode.calls, config.filters) for episode in episodes]
    rewards = [episode.reward for episode in episodes]
    sizes = [_trainable_tok(selection) for selection in selections]
    # An ungraded rollout is out for that reason, whatever its tree looks like.
    masked = [
        OVER_BRANCHING if reward is not None and _discarded(selection) else ""
        for reward, selection in zip(rewards, selections, strict=True)
    ]
    if config.algorithm == PPO:
        groups = _no_groups(ungraded(rewards, sizes, masked))
        keys: list[Hashable] = list(range(len(episodes)))
    else:
        keys = [episode.record.group_id for episode in episodes]
        groups = group_advantages(rewards, keys, sizes, config.group, masked)
    dealt = _deal(keys, groups.out, minibatches, seed)
    return _assemble(selections, rewards, groups, dealt, config)


def build_sft_batch(
    episodes: Sequence[Episode], config: BatchConfig, min_reward: float = 0.0
) -> tuple[Minibatch, BatchReport]:
    """The same rows for supervised learning: advantage 1 on episodes with enough reward.

    Routes are not replayed: who demonstrated need not have recorded any.
    """
    config = dataclasses.replace(config, replay_routes=False)
    selections = [select_calls(episode.calls, config.filters) for episode in episodes]
    rewards = [episode.reward for episode in episodes]
    reasons = []
    for reward, selection in zip(rewards, selections, strict=True):
        if reward is None:
            reasons.append("no reward")
        elif reward < min_reward:
            reasons.append("reward below the cold start's threshold")
        else:
            reasons.append(OVER_BRANCHING if _discarded(selection) else "")
    everyone = GroupAdvantages(np.ones(len(reasons), np.float32), tuple(reasons), Counter())
    inside = [i for i, reason in enumerate(reasons) if not reason]
    batches, report = _assemble(selections, rewards, everyone, [inside], config)
    return batches[0], report


def _no_groups(reasons: Sequence[str]) -> GroupAdvantages:
    counts = Counter(reason for reason in reasons if reason)
    return GroupAdvantages(np.zeros(len(reasons), np.float32), tuple(reasons), counts)


def _deal(
    keys: Sequence[Hashable], reasons: Sequence[str], minibatches: int, seed: int
) -> list[list[int]]:
    """Rollouts in the loss, those of one key together, in random order, in even parts."""
    members: dict[Hashable, list[int]] = {}
    for i, reason in enumerate(reasons):
        if not reason:
            members.setdefault(keys[i], []).append(i)
    order = list(members.values())
    np.random.default_rng(seed).shuffle(order)
    parts: list[list[int]] = [[] for _ in range(max(1, min(minibatches, len(order))))]
    for group in order:
        min(parts, key=len).extend(group)
    return parts


def _assemble(
    selections: Sequence[Selection],
    rewards: Sequence[float | None],
    groups: GroupAdvantages,
    dealt: Sequence[Sequence[int]],
    config: BatchConfig,
) -> tuple[list[Minibatch], BatchReport]:
    batches = []
    for members in dealt:
        chosen = [selections[i] for i in members]
        rollouts = tuple(rollout_calls(selections[i], rewards[i] or 0.0) for i in members)
        batches.append(_minibatch(chosen, rollouts, groups.advantage[list(members)], config))
    rows = [part.rows for batch in batches for part in batch]
    trained = [selections[i] for members in dealt for i in members]
    report = BatchReport(
        rollouts=Counter(reason or "in the loss" for reason in groups.out),
        ledger=check_ledger(selections, groups.out, *rows),
        unique_tok=sum(part.unique_tok for part in rows),
        repeated_tok=sum(part.repeated_tok for part in rows),
        padding_tok=sum(part.padding_tok for part in rows),
        linear_tok=sum(part.linear_tok for part in rows),
        rows=sum(part.tokens.shape[0] for part in rows),
        groups=groups.counts,
        route_disagreement=route_disagreement(trained) if config.replay_routes else 0.0,
    )
    return batches, report


def _minibatch(
    selections: Sequence[Selection],
    rollouts: tuple[RolloutCalls, ...],
    advantage: np.ndarray,  # f32[B]
    config: BatchConfig,
) -> Minibatch:
    sizes = np.array([_trainable_tok(selection) for selection in selections], np.float64)
    per_rollout = _rollout_weights(sizes, config.weighting)
    kept = [selection.tree.calls[i] for selection in selections for i in selection.kept]
    shape = route_shape(kept) if config.replay_routes and kept else None
    parts = []
    for rows in _packed(selections, config):
        weight = at_rollouts(rows, per_rollout)
        if config.weighting == PATH_SUM:
            weight = weight * at_calls(rows, _paths(rows, rollouts))
        own = at_rollouts(rows, advantage) * auxiliary(rows, config.auxiliary_weight)
        routes = routes_of(rows, shape) if shape else None
        parts.append(Part(rows, fill(rows, weight, own, routes), rollouts))
    return tuple(parts)


def _packed(selections: Sequence[Selection], config: BatchConfig) -> tuple[PackedRows, ...]:
    """With replay, calls of different weight versions share no context: their routes differ."""
    how = config.pack
    if config.replay_routes:
        how = dataclasses.replace(how, share_versions=False)
    return pack(selections, how)


def _rollout_weights(sizes: np.ndarray, weighting: str) -> np.ndarray:
    """The part of W that a rollout's tokens have in common; sizes: Z. f64[B]"""
    if weighting == ROLLOUT_MEAN:
        return np.asarray(1.0 / (max(len(sizes), 1) * np.maximum(sizes, 1.0)))
    if weighting == TOKEN_MEAN:
        return np.full_like(sizes, 1.0 / max(float(sizes.sum()), 1.0))
    return np.full_like(sizes, 1.0 / max(len(sizes), 1))


def _paths(rows: PackedRows, rollouts: Sequence[RolloutCalls]) -> np.ndarray:
    """How many paths of the token tree run through each call of `rows.calls`. f32[calls]"""
    count = {c: n for r in rollouts for c, n in zip(r.call_ids, r.paths, strict=True)}
    return np.array([count[call.call_id] for call in rows.calls], np.float32)


def _trainable_tok(selection: Selection) -> int:
    return sum(selection.tree.calls[i].completion_tok for i in selection.kept)


def _discarded(selection: Selection) -> bool:
    return OVER_BRANCHING in selection.dropped.values()

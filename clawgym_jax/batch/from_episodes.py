"""Episodes with rewards -> selected calls -> group advantages -> packed rows -> a TreeBatch.

Not here: the loss itself (`losses`), the model. The token ledger is closed here, on every batch.
Invariant: 1 / (|B| Z_i) is fixed over the whole batch before rows are split into micro-steps.
Source: ClawGym II, GRPO objective; the weights W_v of the shared tree-loss law (count once).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.batch.ledger import SampledLedger, check_ledger
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError, LogprobError
from clawgym_jax.core.types import CallRecord, Episode
from clawgym_jax.losses.advantage import GroupAdvantages, group_advantages
from clawgym_jax.tree.filters import OVER_BRANCHING, FilterConfig, Selection, select_calls
from clawgym_jax.tree.pack import PackConfig, PackedRows, concatenate, pack

ROLLOUT_MEAN = "rollout_mean"  # W = 1 / (|B| Z_i): the paper's rule, each token once
TOKEN_MEAN = "token_mean"  # W = 1 / sum_i Z_i


@dataclass(frozen=True)
class BatchConfig:
    """How episodes become a batch."""

    pack: PackConfig = field(default_factory=PackConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    weighting: str = ROLLOUT_MEAN
    scale_by_std: bool = True
    std_eps: float = 1e-6


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


def build_batch(
    episodes: Sequence[Episode], config: BatchConfig, minibatches: int = 1, seed: int = 0
) -> tuple[list[TreeBatch], BatchReport]:
    """The batches of one reinforcement-learning step. Groups are `record.group_id`.

    Advantages are those of the whole batch; groups are dealt to `minibatches` optimiser steps, |B|
    and Z being those of a minibatch.
    """
    selections = [select_calls(episode.calls, config.filters) for episode in episodes]
    rewards = [
        None if _discarded(selection) else episode.reward
        for episode, selection in zip(episodes, selections, strict=True)
    ]
    groups = group_advantages(
        rewards,
        [episode.record.group_id for episode in episodes],
        [_trainable_tok(selection) for selection in selections],
        scale_by_std=config.scale_by_std,
        eps=config.std_eps,
    )
    reasons = [
        OVER_BRANCHING if _discarded(selection) else why
        for selection, why in zip(selections, groups.out, strict=True)
    ]
    parts = _deal(episodes, reasons, minibatches, seed)
    return _assemble(selections, reasons, parts, groups.advantage, config, groups)


def build_sft_batch(
    episodes: Sequence[Episode], config: BatchConfig, min_reward: float = 0.0
) -> tuple[TreeBatch, BatchReport]:
    """The same rows for supervised learning: advantage 1 on episodes with enough reward."""
    selections = [select_calls(episode.calls, config.filters) for episode in episodes]
    reasons = []
    for episode, selection in zip(episodes, selections, strict=True):
        if episode.reward is None:
            reasons.append("no reward")
        elif episode.reward < min_reward:
            reasons.append("reward below the cold start's threshold")
        else:
            reasons.append(OVER_BRANCHING if _discarded(selection) else "")
    ones = np.ones(len(selections), np.float32)
    inside = [i for i, reason in enumerate(reasons) if not reason]
    batches, report = _assemble(selections, reasons, [inside], ones, config, None)
    return batches[0], report


def _deal(
    episodes: Sequence[Episode], reasons: Sequence[str], minibatches: int, seed: int
) -> list[list[int]]:
    """Rollouts in the loss, whole groups at a time in random order, in even parts."""
    members: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if not reason:
            members.setdefault(episodes[i].record.group_id, []).append(i)
    order = list(members.values())
    np.random.default_rng(seed).shuffle(order)
    parts: list[list[int]] = [[] for _ in range(max(1, min(minibatches, len(order))))]
    for group in order:
        min(parts, key=len).extend(group)
    return parts


def _assemble(
    selections: Sequence[Selection],
    reasons: Sequence[str],
    parts: Sequence[Sequence[int]],
    advantage: np.ndarray,  # f32[B]
    config: BatchConfig,
    groups: GroupAdvantages | None,
) -> tuple[list[TreeBatch], BatchReport]:
    packed = [rows for part in parts for rows in pack([selections[i] for i in part], config.pack)]
    rows = concatenate(packed)
    weights = [
        _rollout_weights(
            np.array([_trainable_tok(selections[i]) for i in part], np.float32), config.weighting
        )
        for part in parts
    ]
    dealt = np.array([i for part in parts for i in part], int)
    whole = _fill(rows, np.concatenate(weights), advantage[dealt])
    borders = np.cumsum([0, *(p.tokens.shape[0] for p in packed)])
    batches = [whole.rows_between(a, b) for a, b in itertools.pairwise(borders.tolist())]
    report = BatchReport(
        rollouts=Counter(reason or "in the loss" for reason in reasons),
        ledger=check_ledger(selections, reasons, rows),
        unique_tok=rows.unique_tok,
        repeated_tok=rows.repeated_tok,
        padding_tok=rows.padding_tok,
        linear_tok=rows.linear_tok,
        rows=rows.tokens.shape[0],
        groups=groups.counts if groups else Counter(),
    )
    return batches, report


def _rollout_weights(sizes: np.ndarray, weighting: str) -> np.ndarray:
    """W of each rollout's tokens. f32[B]"""
    if weighting == ROLLOUT_MEAN:
        return np.asarray(1.0 / (max(len(sizes), 1) * np.maximum(sizes, 1.0)), np.float32)
    if weighting == TOKEN_MEAN:
        return np.full_like(sizes, 1.0 / max(float(sizes.sum()), 1.0))
    raise ConfigError(
        f'unknown weighting {weighting!r}; expected "{ROLLOUT_MEAN}" or "{TOKEN_MEAN}"'
    )


def _fill(rows: PackedRows, weights: np.ndarray, advantage: np.ndarray) -> TreeBatch:
    """Gathers per-call and per-rollout numbers to the trainable tokens."""
    for call in rows.calls:
        _check_logprobs(call)
    mask = rows.mask
    at = (np.where(mask, rows.call, 0), np.where(mask, rows.offset, 0))
    logprobs = np.zeros(mask.shape, np.float32)
    temperature = np.ones(mask.shape, np.float32)
    if rows.calls:
        starts = np.cumsum([0, *(c.completion_tok for c in rows.calls)])
        flat = np.concatenate([c.completion.logprobs for c in rows.calls]).astype(np.float32)
        logprobs = np.where(mask, flat[starts[at[0]] + at[1]], 0.0).astype(np.float32)
        per_call = np.array([c.effective.temperature for c in rows.calls], np.float32)
        temperature = np.where(mask, per_call[at[0]], 1.0).astype(np.float32)
    rollout = np.where(mask, rows.rollout, 0)
    target = np.take_along_axis(rows.tokens, np.where(mask, rows.target, 0), axis=1)

    def spread(values: np.ndarray) -> np.ndarray:
        if not len(values):
            return np.zeros(mask.shape, np.float32)
        return np.where(mask, values[rollout], 0.0).astype(np.float32)

    return TreeBatch(
        tokens=rows.tokens,
        position=rows.position,
        end=rows.end,
        target=np.where(mask, target, 0).astype(np.int32),
        pred=rows.pred,
        mask=mask,
        weight=spread(weights),
        advantage=spread(advantage),
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.copy(),
        temperature=temperature,
    )


def _check_logprobs(call: CallRecord) -> None:
    """Known fault A14: missing or misaligned log-probs are an error, never padded."""
    done = call.completion
    n = len(done.ids)
    for name in ("logprobs", "raw_logprobs", "versions"):
        got = len(getattr(done, name))
        if got != n:
            raise LogprobError(
                f"call {call.call_id}: {n} sampled tokens but {got} {name}; "
                "this episode cannot be trained on"
            )
    if not np.all(np.isfinite(done.logprobs)):
        raise LogprobError(f"call {call.call_id} has a log-prob that is not finite")
    if call.effective.temperature <= 0:
        raise LogprobError(
            f"call {call.call_id} was sampled greedily (temperature 0): "
            "there is no policy gradient; expected a positive temperature"
        )


def _trainable_tok(selection: Selection) -> int:
    return sum(selection.tree.calls[i].completion_tok for i in selection.kept)


def _discarded(selection: Selection) -> bool:
    return OVER_BRANCHING in selection.dropped.values()

"""One reinforcement-learning step: graded episodes in, new weights and a page of numbers out.

    episodes -> batch (ledger closed) -> old log-probs -> log-prob check, rollout correction
             -> reference log-probs (with a KL penalty) -> values, advantages (with PPO)
             -> updates of the value model (with PPO) -> updates of the policy

Not here: rollouts, checkpoints, the order of steps (`loop`).
Invariant: given the same state and episodes, the new state is the same bit for bit (CPU).
Source: ClawGym II, GRPO and PPO on prefix trees.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from clawgym_jax.batch.from_episodes import BatchReport, build_batch
from clawgym_jax.batch.scored import set_old, set_ref, set_values
from clawgym_jax.batch.tree_batch import Minibatch
from clawgym_jax.core.errors import LogprobError
from clawgym_jax.core.types import Episode, Outcome
from clawgym_jax.train.learner import PERMUTED, Learner
from clawgym_jax.train.state import RunState
from clawgym_jax.train.step import logprob_check, value_summary


def reinforce(
    state: RunState,
    learner: Learner,
    episodes: Sequence[Episode],
    seed: int,
    reference: Any = None,
    value_only: bool = False,
) -> tuple[RunState, dict[str, Any]]:
    """Raises LedgerError or LogprobError where tokens or log-probs do not agree.

    reference: parameters that a KL penalty pulls towards. value_only: the policy stays as it is
    (the value model's pretraining).
    """
    clock = _Stopwatch()
    config = learner.reinforce
    used = _permuted(episodes, seed) if config.rewards == PERMUTED else list(episodes)
    batches, report = build_batch(used, learner.batch, config.minibatches, seed)
    clock.lap("pack_s")
    pulls = learner.wants_reference and not value_only
    assert reference is not None or not pulls, "a KL penalty needs the reference's parameters"
    batches, measured = _with_logprobs(state, learner, batches, reference if pulls else None)
    clock.lap("old_logprobs_s")
    if learner.critic is not None:
        batches, about = _with_values(state, learner, batches)
        measured |= about
        clock.lap("values_s")
        state, about = _update_value(state, learner, batches)
        measured |= about
        clock.lap("value_update_s")
    if not value_only:
        state, about = _update_policy(state, learner, batches)
        measured |= about
        clock.lap("update_s")
    return state, {**measured, **_counts(episodes, report), **clock.seconds}


def _with_logprobs(
    state: RunState, learner: Learner, batches: Sequence[Minibatch], reference: Any
) -> tuple[list[Minibatch], dict[str, float]]:
    """Old log-probs, the check against the engine's, the correction, reference log-probs.

    reference: None where the policy is not updated, or has no KL penalty.
    """
    out, drift = [], []
    for batch in batches:
        old = [learner.policy.logprobs(state.policy.params, part.arrays) for part in batch]
        batch, about = set_old(batch, old, learner.batch)
        drift.append(about)
        if reference is not None:
            scored = [learner.policy.logprobs(reference, part.arrays) for part in batch]
            batch = set_ref(batch, scored)
        out.append(batch)
    return out, _check(out, learner.reinforce.max_logprob_gap) | _means(drift)


def _with_values(
    state: RunState, learner: Learner, batches: Sequence[Minibatch]
) -> tuple[list[Minibatch], dict[str, float]]:
    """Values before the update; returns and advantages from them."""
    assert learner.critic is not None
    params = learner.value_state(state).params
    out, about = [], []
    for batch in batches:
        values = [learner.critic.values(params, part.arrays) for part in batch]
        batch, found = set_values(batch, values, learner.batch)
        out.append(batch)
        about.append(found)
    return out, _means(about)


def _update_value(
    state: RunState, learner: Learner, batches: Sequence[Minibatch]
) -> tuple[RunState, dict[str, float]]:
    """The numbers are of the first pass over the batch, each minibatch just before its update.

    How good the values were that the advantages came from: `old_explained_variance`.
    """
    assert learner.critic is not None
    value, passes = learner.value_state(state), []
    for _ in range(learner.critic_config.epochs):
        for batch in _trainable(batches):
            value, metrics = learner.critic.update(value, [part.arrays for part in batch])
            passes.append(metrics)
    first = passes[: len(_trainable(batches))]
    return dataclasses.replace(state, value=value), value_summary(first) if first else {}


def _update_policy(
    state: RunState, learner: Learner, batches: Sequence[Minibatch]
) -> tuple[RunState, dict[str, float]]:
    policy, updates = state.policy, []
    for _ in range(learner.reinforce.epochs):
        for batch in _trainable(batches):
            policy, metrics = learner.policy.update(policy, [part.arrays for part in batch])
            updates.append(metrics)
    metrics = _means(updates) | {"updates": float(len(updates))}
    if updates:
        metrics["trained_tok"] = float(sum(u["trained_tok"] for u in updates))
    return dataclasses.replace(state, policy=policy), metrics


def _trainable(batches: Sequence[Minibatch]) -> list[Minibatch]:
    return [batch for batch in batches if any(part.arrays.mask.any() for part in batch)]


def _check(batches: Sequence[Minibatch], limit: float) -> dict[str, float]:
    parts = [part.arrays for batch in batches for part in batch]
    gaps = [logprob_check(arrays) for arrays in parts]
    worst = float(np.max([g["logprob_gap_max"] for g in gaps], initial=0.0))  # NaN stays NaN
    if np.isnan(worst):
        raise LogprobError(
            "the trainer's log-probs are not numbers, expected at most 0: the weights are broken "
            "(NaN or infinite); go on from an earlier checkpoint, with a lower learning rate"
        )
    if limit and worst > limit:
        raise LogprobError(
            f"the engine's and the trainer's log-probs differ by {worst:.2e}, expected at most "
            f"{limit:.0e}: a splice, an offset or stale keys and values; compare "
            "episodes with launch/report.py --calls before training on them. Where they were "
            "sampled by other weights (an offline run of another configuration), or with "
            "engine.kv_dtype=int8, it has to be so: set loop.reinforce.max_logprob_gap=0"
        )
    count = [int(arrays.mask.sum()) for arrays in parts]
    total = sum(n * g["logprob_gap_mean"] for n, g in zip(count, gaps, strict=True))
    return {"logprob_gap_max": worst, "logprob_gap_mean": total / max(sum(count), 1)}


def _means(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over passes; of what is named an extreme, the extreme."""
    out = {}
    for name in passes[0] if passes else ():
        values = [p[name] for p in passes if name in p]
        join: Any = np.mean
        if name.endswith(("_max", "_min")):
            join = max if name.endswith("_max") else min
        out[name] = float(join(values))
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
        "route_disagreement": report.route_disagreement,
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

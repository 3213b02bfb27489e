"""Faults that a review found: broken weights that looked well, silent and late failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.batch.from_episodes import build_batch
from clawgym_jax.batch.scored import set_values
from clawgym_jax.core.errors import ConfigError, LogprobError, TrainingError
from clawgym_jax.core.types import Episode
from clawgym_jax.train.learner import Learner, ReinforceConfig
from clawgym_jax.train.reinforce import reinforce
from clawgym_jax.train.sft import ColdStartConfig, train_supervised
from clawgym_jax.train.state import init_state
from clawgym_jax.train.step import TrainStep
from tests.batch.episodes import episode, simple
from tests.batch.test_routes import routed
from tests.train.test_step import (
    CONFIG,
    LOSS,
    MODEL,
    OPTIMIZER,
    arrays,
    episodes,
    minibatch,
    policy,
)

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def learner(**batch: Any) -> tuple[Learner, Any]:
    graphdef, params = policy()
    config = dataclasses.replace(CONFIG, **batch)
    settings = ReinforceConfig(max_logprob_gap=0.0)
    step = TrainStep(graphdef, OPTIMIZER, LOSS)
    return Learner(MODEL, step, OPTIMIZER, config, settings), params


def test_weights_that_are_not_numbers_do_not_pass_for_agreement() -> None:
    """NaN is not larger than a limit, and the loss of such weights is a calm 0."""
    made, params = learner()
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    for limit in (1e-4, 0.0):
        strict = dataclasses.replace(made, reinforce=ReinforceConfig(max_logprob_gap=limit))
        with pytest.raises(LogprobError, match="weights are broken"):
            reinforce(strict.begin(broken), strict, episodes(1, 4), seed=0)


def test_an_update_that_is_not_finite_stops_the_run() -> None:
    """Else the next checkpoint holds it, and every resume fails."""
    graphdef, params = policy()
    step = TrainStep(graphdef, OPTIMIZER, LOSS)
    batch = [
        part.replace(advantage=np.where(part.mask, np.float32(np.nan), 0.0))
        for part in arrays(minibatch(1))
    ]
    with pytest.raises(TrainingError, match="grad_norm"):
        step.update(init_state(params, OPTIMIZER), batch)


def test_the_mean_gap_is_a_mean_over_tokens() -> None:
    made, params = learner()
    halves = ReinforceConfig(minibatches=2, max_logprob_gap=0.0)
    made = dataclasses.replace(made, reinforce=halves)
    seen = episodes(1, 8)
    batches, _ = build_batch(seen, CONFIG, 2, seed=0)
    gaps = [
        np.abs(made.policy.logprobs(params, p.arrays) - p.arrays.rollout_logprobs)[p.rows.mask]
        for batch in batches
        for p in batch
    ]
    assert len({len(g) for g in gaps}) > 1, "parts have to be of unequal size"
    _, metrics = reinforce(made.begin(params), made, seen, seed=0)
    np.testing.assert_allclose(metrics["logprob_gap_mean"], np.concatenate(gaps).mean(), rtol=1e-5)


def test_disagreement_of_routes_is_among_the_metrics() -> None:
    """docs/training.md promises it."""
    made, params = learner(replay_routes=True)
    seen = [
        dataclasses.replace(e, calls=tuple(_with_few_experts(c) for c in e.calls))
        for e in routed(episodes(1, 4))
    ]
    _, report = build_batch(seen, made.batch)
    _, metrics = reinforce(made.begin(params), made, seen, seed=0)
    assert metrics["route_disagreement"] == report.route_disagreement > 0


def _with_few_experts(call: Any) -> Any:
    routing = call.completion.routing
    few = np.where(routing == 255, routing, routing % 3 + np.array([0, 3], np.uint8))
    done = dataclasses.replace(call.completion, routing=few.astype(np.uint8))
    return dataclasses.replace(call, completion=done)


def test_whitening_nothing_warns_of_nothing() -> None:
    """Warnings are errors here: the mean of an empty batch was one."""
    config = dataclasses.replace(CONFIG, algorithm="ppo", whiten_advantages=True)
    (batch,), _ = build_batch([simple("a", None, 4)], config)
    filled, metrics = set_values(batch, [np.zeros(p.rows.mask.shape) for p in batch], config)
    assert len(filled) == 1 and not metrics


def test_a_cold_start_learns_from_demonstrations_with_tokens_only() -> None:
    graphdef, params = policy()
    step = TrainStep(graphdef, OPTIMIZER, dataclasses.replace(LOSS, kind="sft"))
    cold = ColdStartConfig(updates=4, rollouts_per_update=1, min_reward=0.0)
    seen: list[dict[str, float]] = []

    def run(demonstrations: list[Episode]) -> None:
        state = init_state(params, OPTIMIZER)
        train_supervised(
            state, step, demonstrations, CONFIG, cold, 0, lambda n, s, m: seen.append(m)
        )

    empty = [episode(f"e{i}", [], 1.0) for i in range(3)]
    run([*empty, simple("a", 1.0, 4)])
    assert len(seen) == 4 and all("nll" in m for m in seen)
    with pytest.raises(ConfigError, match="trainable token"):
        run(empty)

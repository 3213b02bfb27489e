"""Faults that a review found: broken weights that looked well, silent and late failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.assemble import make_learner
from clawgym_jax.batch.from_episodes import build_batch
from clawgym_jax.batch.scored import set_values
from clawgym_jax.config import ExperimentConfig, check, configure, override
from clawgym_jax.core.errors import ConfigError, LogprobError, TrainingError
from clawgym_jax.core.types import Episode
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.train.learner import Learner, ReinforceConfig
from clawgym_jax.train.reinforce import reinforce
from clawgym_jax.train.sft import ColdStartConfig, train_supervised
from clawgym_jax.train.state import OptimConfig, init_state, make_optimizer
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


# ---- configurations ---------------------------------------------------------------------------

PPO = "batch.algorithm=ppo"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["loss.balance_coef=0.1"], "dense model"),
        (["batch.replay_routes=True", "engine.routing=True"], "dense model"),
        (["loop.group_size=1"], "group_size"),
        (["batch.lam=0.9"], "does not read batch.lam"),
        (["batch.whiten_advantages=True"], "does not read batch.whiten_advantages"),
        (["critic.pretrain_steps=1"], "does not read critic.pretrain_steps"),
        ([PPO, "batch.group.drop_uniform=True"], "does not read batch.group"),
        (["cold_start.demonstrations=0"], "demonstrations"),
        (["batch.pack.row_tok=512"], "row_tok >= 768"),
        (["batch.pack.train_tok=64"], "train_tok >= 96"),
        (["mesh.fsdp=1", "mesh.x=8", "batch.pack.shorter=100"], r"mesh.x=8, got \[100"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_refused_at_the_start(
    settings: list[str], said: str
) -> None:
    """Each of these failed after the first step's rollouts, or was ignored."""
    config = configure(EXPERIMENTS / "quickstart.py", settings)
    with pytest.raises(ConfigError, match=said):
        check(config, mixture=False)


def test_the_learner_is_checked() -> None:
    config = configure(EXPERIMENTS / "quickstart.py", ["loss.balance_coef=0.1"])
    dense = Qwen3Config(
        vocab_size=11, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        intermediate_size=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="dense model"):
        make_learner(config, dense, None, None)


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("mix_*.py")), ids=lambda p: p.stem)
def test_our_experiments_fit(file: Path, scale: str) -> None:
    config = configure(file, [f"scale={scale}"])
    check(config, mixture=True)
    check(override(config, ["batch.replay_routes=True", "engine.routing=True"]), mixture=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("loop.checkpoint_every=0", "checkpoint_every"),
        ("loop.cold_checkpoint_every=0", "cold_checkpoint_every"),
        ("loop.temperature=0", "temperature"),
        ("model.micro_rows=0", "micro_rows"),
        ("seed=-1", "seed"),
        ("loss.dual_clip=0.5", "dual_clip"),
        ("loss.clip_low=-0.1", "clip_low"),
        ("batch.filters.max_leaves=-1", "max_leaves"),
        ("cold_start.rollouts_per_update=0", "rollouts_per_update"),
    ],
)
def test_numbers_out_of_range_are_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        override(ExperimentConfig(name="x"), [setting])


def test_a_gradient_is_not_clipped_to_less_than_nothing() -> None:
    """A negative norm would turn it round."""
    with pytest.raises(ConfigError, match="grad_clip"):
        make_optimizer(OptimConfig(grad_clip=-1.0))

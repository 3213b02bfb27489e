"""What turns a step's episodes into new weights: programs and settings of both models.

Not here: the order of things in a step (`reinforce`), stages (`loop`).
Invariant: with PPO there is a value model, without it there is none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from clawgym_jax.batch.config import PPO, BatchConfig
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.train.critic import CriticConfig, init_critic
from clawgym_jax.train.state import RunState, TrainState, init_state, state_shapes
from clawgym_jax.train.step import TrainStep, ValueStep

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


@dataclass(frozen=True)
class Learner:
    """Programs, optimisers and settings; holds no weights."""

    model: Qwen3Config
    policy: TrainStep
    optimizer: optax.GradientTransformation
    batch: BatchConfig
    reinforce: ReinforceConfig
    critic: ValueStep | None = None
    critic_optimizer: optax.GradientTransformation | None = None
    critic_config: CriticConfig = field(default_factory=CriticConfig)
    parallel: Parallel | None = None  # the training mesh, where the parameters lie

    def __post_init__(self) -> None:
        if (self.batch.algorithm == PPO) != (self.critic is not None):
            raise ConfigError(
                f"batch.algorithm={self.batch.algorithm}: expected a value model with ppo and none "
                "with grpo"
            )

    @property
    def pretrain_steps(self) -> int:
        """Steps at the start that train the value model only."""
        return self.critic_config.pretrain_steps if self.critic is not None else 0

    @property
    def wants_reference(self) -> bool:
        return self.policy.loss.kl_coef > 0

    def begin(self, params: Any) -> RunState:
        """Both models as they are before the first step; the value model starts as the policy."""
        policy = init_state(params, self.optimizer, self.parallel)
        if self.critic is None or self.critic_optimizer is None:
            return RunState(policy)
        start = init_critic(self.model, params)
        return RunState(policy, init_state(start, self.critic_optimizer, self.parallel))

    def shapes(self, params: Any) -> RunState:
        """What `begin` gives, as shapes that know their sharding. params: arrays or shapes."""
        policy = state_shapes(params, self.optimizer, self.parallel)
        if self.critic is None or self.critic_optimizer is None:
            return RunState(policy)
        start = jax.eval_shape(functools.partial(init_critic, self.model), params)
        return RunState(policy, state_shapes(start, self.critic_optimizer, self.parallel))

    def value_state(self, state: RunState) -> TrainState:
        assert state.value is not None, "PPO without a value model"
        return state.value

"""What training carries from step to step, and the optimiser that moves it.

Not here: programs (`step`), files (`checkpoint`).
Invariant: everything that influences the next update is in TrainState.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model import sharding
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.train import mesh


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. Defaults are ClawGym I's released settings; see the experiment for others."""

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    decay_steps: int = 0  # 0 = constant after the warm-up, else linear decay to 0 over that many
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # global norm; 0 = off


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree: parameters, optimiser state, number of updates."""

    params: Any
    opt_state: Any
    updates: jax.Array  # i32[]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """The policy and, with PPO, the value model."""

    policy: TrainState
    value: TrainState | None = None


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW under the schedule."""
    if config.learning_rate <= 0:
        raise ConfigError(f"expected a positive learning_rate, got {config.learning_rate}")
    if config.grad_clip < 0:
        raise ConfigError(f"expected a grad_clip of at least 0 (off), got {config.grad_clip}")
    clip = optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity()
    adam = optax.adamw(
        schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    return optax.chain(clip, adam)


def schedule(config: OptimConfig) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then constant or linear decay."""
    peak = config.learning_rate
    parts = [optax.constant_schedule(peak)]
    if config.decay_steps:
        parts = [optax.linear_schedule(peak, 0.0, config.decay_steps)]
    if config.warmup_steps:
        parts.insert(0, optax.linear_schedule(0.0, peak, config.warmup_steps))
        return optax.join_schedules(parts, [config.warmup_steps])
    return parts[0]


def init_state(
    params: Any, optimizer: optax.GradientTransformation, parallel: Parallel | None = None
) -> TrainState:
    """Fresh optimiser state around a copy of `params`; on a mesh both lie where the table says."""

    def fresh(params: Any) -> TrainState:
        params = jax.tree.map(jnp.copy, params)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    if parallel is None:
        return fresh(params)
    return jax.jit(lambda params: mesh.keep_placed(parallel, fresh(params)))(params)  # type: ignore[no-any-return]


def state_shapes(
    params: Any, optimizer: optax.GradientTransformation, parallel: Parallel | None = None
) -> TrainState:
    """What `init_state` gives, as shapes that know their sharding. params: arrays or shapes."""
    found = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    return found if parallel is None else sharding.shaped(found, parallel.mesh)  # type: ignore[no-any-return]

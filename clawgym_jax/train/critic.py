"""The value model of PPO: a trunk like the policy's with one number for each state.

    V = head . hidden + bias;  loss = sum_v W_v l(V(state before v), R)

V of trainable token i is read at pred[i], the state before the action; siblings and rollouts that
share that state keep a target each. The trunk starts as a copy of the policy's, the head at zero.
Not here: returns and advantages (`losses.gae`, `batch`), updates (`step`).
Invariant: the value model shares no array with the policy.
Source: ClawGym II, PPO: value loss (V - R)^2, lambda = gamma = 1, a value-pretraining stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.losses.value import explained_variance_sums, value_loss
from clawgym_jax.model.attention_choice import NAMES
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.logprobs import gather_hidden
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Qwen3
from clawgym_jax.model.sharding import X
from clawgym_jax.train.forward import forward_rows
from clawgym_jax.train.mesh import OVERFLOW
from clawgym_jax.train.state import OptimConfig

TRUNK, HEAD = "trunk", "value"


@dataclass(frozen=True)
class CriticConfig:
    """The paper names the stage and the loss; numbers are ours."""

    pretrain_steps: int = 0  # steps at the start that train the value model only
    epochs: int = 1  # passes of the value model over a step's batch
    clip_eps: float = 0.0  # of the value loss; 0 = plain, as in the paper
    attention: str = "auto"  # a name of model.attention_choice
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))

    def __post_init__(self) -> None:
        if self.pretrain_steps < 0 or self.epochs < 1 or self.clip_eps < 0:
            raise ConfigError(
                "critic: expected pretrain_steps >= 0, epochs >= 1, clip_eps >= 0, got "
                f"{self.pretrain_steps}, {self.epochs}, {self.clip_eps}"
            )
        if self.attention not in NAMES:
            raise ConfigError(
                f"critic.attention: expected one of {', '.join(NAMES)}, got {self.attention!r}"
            )


def trunk_config(policy: Qwen3Config) -> Qwen3Config:
    """The policy's model without an output head of its own."""
    return policy.replace(tie_word_embeddings=True)


def init_critic(policy: Qwen3Config, params: Any) -> dict[str, Any]:
    """A copy of the policy's trunk under a head of zeros.

    {"trunk": state without output head, "value": f32[D], "bias": f32[]}; the copy is made by
    whoever places it (`state.init_state`).
    """
    flat = {path: leaf for path, leaf in nnx.to_flat_state(params) if path != ("head",)}
    width = jnp.zeros((policy.hidden_size,), policy.param_dtype)
    bias = jnp.zeros((), policy.param_dtype)
    return {TRUNK: nnx.from_flat_state(flat), HEAD: width, "bias": bias}


def value_rows(
    graphdef: nnx.GraphDef[Qwen3],
    config: CriticConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """f32[R, K]: V before each trainable token, 0 at padding; and `Output.overflow`.

    Recorded routes are the policy's: this model goes by its own router.
    """
    batch = batch.replace(routes=None)
    out = forward_rows(graphdef, config.attention, params[TRUNK], batch, parallel)
    states = gather_hidden(out.hidden, jnp.asarray(batch.pred), None if parallel is None else X)
    precise = jnp.promote_types(states.dtype, jnp.float32)
    head = params[HEAD].astype(precise)
    values = jnp.einsum("rkd,d->rk", states.astype(precise), head) + params["bias"].astype(precise)
    return jnp.where(jnp.asarray(batch.mask), values, 0.0), out.overflow


def value_sums(
    graphdef: nnx.GraphDef[Qwen3],
    config: CriticConfig,
    params: Any,
    batch: TreeBatch,
    load: jax.Array | None = None,
    parallel: Parallel | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of some rows and sums for the metrics. load: none, the router is the policy's."""
    values, overflow = value_rows(graphdef, config, params, batch, parallel)
    mask, returns = jnp.asarray(batch.mask), jnp.asarray(batch.returns)
    weight = jnp.where(mask, batch.weight, 0.0)
    loss = value_loss(values, jnp.asarray(batch.old_values), returns, config.clip_eps)
    sums = explained_variance_sums(values, returns, weight)
    if overflow is not None:
        sums[OVERFLOW] = overflow
    return jnp.sum(weight * loss), sums

"""The policy's objective on packed rows: PPO's and GRPO's clipped surrogate, or supervised.

    loss = -sum_v W_v (w_v S_v - kl_coef KL_v + entropy_coef H_v) + balance_coef B

S_v is the clipped surrogate of the token's advantage (which is GRPO's, or PPO's R - V: the batch
says), w_v the rollout correction, KL_v an estimate of KL(pi || pi_ref), H_v the entropy, B the
load-balance loss. Supervised learning is the same rows with w S = log pi * A.
Not here: weights, advantages and corrections (`batch`), gradients and updates (`step`).
Invariant: a plain sum over tokens, so any split into micro-steps gives the same gradient.
Source: ClawGym II, equations 8 to 10; the shared tree-loss law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.losses.correction import log_ratio
from clawgym_jax.losses.kl import kl_estimate
from clawgym_jax.losses.policy import clipped_surrogate
from clawgym_jax.model.attention_choice import NAMES
from clawgym_jax.model.logprobs import TokenLogprobs, token_logprobs
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Output, Qwen3, make_head
from clawgym_jax.model.sharding import X
from clawgym_jax.train.balance import balance_loss, expert_load, strayed_routes
from clawgym_jax.train.forward import forward_rows
from clawgym_jax.train.mesh import OVERFLOW

CLIPPED = "clipped"
SFT = "sft"


@dataclass(frozen=True)
class LossConfig:
    """Defaults are ClawGym I's released settings: no KL, no entropy bonus."""

    kind: str = CLIPPED  # "clipped" (PPO and GRPO) | "sft": log-prob times advantage, no ratio
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # 0 = off
    kl_coef: float = 0.0  # beta; above 0 a copy of the first policy is kept and scored
    kl_kind: str = "k3"  # "k1" | "k2" | "k3", see losses.kl
    entropy_coef: float = 0.0
    balance_coef: float = 0.0  # of the load-balance loss; above 0 the batch is routed once more
    attention: str = "auto"  # a name of model.attention_choice
    logit_chunk: int = 512  # trainable tokens whose logits exist at one time, per row

    def __post_init__(self) -> None:
        if self.kind not in (CLIPPED, SFT):
            raise ConfigError(f'loss.kind: expected "{CLIPPED}" or "{SFT}", got {self.kind!r}')
        if self.kl_kind not in ("k1", "k2", "k3"):
            raise ConfigError(f'loss.kl_kind: expected "k1", "k2" or "k3", got {self.kl_kind!r}')
        for name in ("kl_coef", "entropy_coef", "balance_coef", "clip_low", "clip_high"):
            if getattr(self, name) < 0:
                raise ConfigError(f"loss.{name}: expected at least 0, got {getattr(self, name)}")
        if self.dual_clip and not self.dual_clip > 1:
            raise ConfigError(
                f"loss.dual_clip: expected 0 (off) or more than 1, got {self.dual_clip}; "
                "at 1 and below no token with a negative advantage is learned from"
            )
        if self.attention not in NAMES:
            raise ConfigError(
                f"loss.attention: expected one of {', '.join(NAMES)}, got {self.attention!r}"
            )


def score_rows(
    graphdef: nnx.GraphDef[Qwen3], loss: LossConfig, params: Any, batch: TreeBatch
) -> TokenLogprobs:
    """Log-probs of the trainable tokens of packed rows; f32[R, K] each."""
    return forward_and_score(graphdef, loss, params, batch)[0]


def forward_and_score(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
) -> tuple[TokenLogprobs, jax.Array | None]:
    """`score_rows` of one device or one chip of a mesh, and `Output.overflow`."""
    scored, out = _score(graphdef, loss, params, batch, parallel)
    return scored, out.overflow


def _score(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None,
) -> tuple[TokenLogprobs, Output]:
    out = forward_rows(graphdef, loss.attention, params, batch, parallel)
    scored = token_logprobs(
        make_head(graphdef, params),
        out.hidden,
        batch.pred,
        batch.target,
        batch.temperature,
        loss.logit_chunk,
        None if parallel is None else X,
    )
    return scored, out


def load_of_rows(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`balance.expert_load` of some rows, f32[L, E], and `Output.overflow`."""
    out = forward_rows(graphdef, loss.attention, params, batch, parallel, want_routing=True)
    return expert_load(out, batch, parallel), out.overflow


def loss_sums(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    load: jax.Array | None = None,
    parallel: Parallel | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of some rows and sums for the metrics. load: see `balance.balance_loss`."""
    scored, out = _score(graphdef, loss, params, batch, parallel)
    mask = jnp.asarray(batch.mask)
    weight = jnp.where(mask, batch.weight, 0.0)
    new = jnp.where(mask, scored.logprobs, 0.0)
    old = jnp.where(mask, batch.old_logprobs, 0.0) if loss.kind != SFT else new
    objective, clipped = _objective(loss, new, old, batch)
    entropy = jnp.where(mask, scored.entropy, 0.0)
    ratio = jnp.where(mask, jnp.exp(log_ratio(new, old)), 1.0)
    if loss.entropy_coef:
        objective = objective + loss.entropy_coef * entropy
    sums = {
        "tokens": jnp.sum(mask),
        "clipped": jnp.sum(clipped & mask),
        "entropy": jnp.sum(entropy),
        "kl_old": jnp.sum(jnp.where(mask, kl_estimate(old, new), 0.0)),
        "nll": -jnp.sum(new),
        "ratio_max": jnp.max(ratio),
        "ratio_min": jnp.min(ratio),
    }
    if loss.kl_coef:
        kl = jnp.where(mask, kl_estimate(new, batch.ref_logprobs, loss.kl_kind), 0.0)
        objective = objective - loss.kl_coef * kl
        sums["kl_ref"] = jnp.sum(kl)
    value = -jnp.sum(weight * objective)
    if load is not None:
        sums["balance"] = balance_loss(out, batch, load, parallel)
        value = value + loss.balance_coef * sums["balance"]
    if batch.routes is not None:
        sums["strayed"], sums["replayed"] = strayed_routes(out, batch, parallel)
    if out.overflow is not None:
        sums[OVERFLOW] = out.overflow
    return value, sums


def _objective(
    loss: LossConfig, new: jax.Array, old: jax.Array, batch: TreeBatch
) -> tuple[jax.Array, jax.Array]:
    """Per token, to be maximised, and where the clip cut the gradient."""
    if loss.kind == SFT:
        return new * batch.advantage, jnp.zeros(new.shape, bool)
    surrogate = clipped_surrogate(
        new, old, batch.advantage,
        clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip,
    )  # fmt: skip
    return batch.correction * surrogate.objective, surrogate.clipped

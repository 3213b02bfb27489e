"""The jitted programs of training: old log-probs, gradients of a micro-step, the update.

One program serves supervised learning and GRPO: supervised learning is the same packed rows with
advantage 1 and no ratio. Gradients are sums over micro-steps, the weights W being fixed over the
whole batch beforehand, so any split into micro-steps gives the same update.
Not here: batches (`batch`), the order of things (`loop`).
Invariant: one compilation per program and row shape.
Source: ClawGym II, equations 8 to 10; the shared tree-loss law.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.losses.correction import log_ratio, truncated_importance
from clawgym_jax.losses.policy import clipped_surrogate
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.logprobs import TokenLogprobs, token_logprobs
from clawgym_jax.model.qwen3 import Qwen3, apply, apply_logits
from clawgym_jax.model.tree_attention import tree_attention
from clawgym_jax.train.state import TrainState

GRPO = "grpo"
SFT = "sft"


@dataclass(frozen=True)
class LossConfig:
    """Defaults are ClawGym I's released settings, but for `correction_cap`, which is ours."""

    kind: str = GRPO  # "grpo" | "sft"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # 0 = off
    correction_cap: float = 2.0  # c_bar of the rollout correction; 0 = off
    attention: str = "blocked"  # "blocked" | "dense" (the oracle)
    logit_chunk: int = 512  # trainable tokens whose logits exist at one time, per row

    def __post_init__(self) -> None:
        if self.kind not in (GRPO, SFT):
            raise ConfigError(f'loss.kind: expected "{GRPO}" or "{SFT}", got {self.kind!r}')
        if self.attention not in ("blocked", "dense"):
            raise ConfigError(f'loss.attention: expected "blocked" or "dense": {self.attention!r}')


def score_rows(
    graphdef: nnx.GraphDef[Qwen3], loss: LossConfig, params: Any, batch: TreeBatch
) -> TokenLogprobs:
    """Log-probs of the trainable tokens of packed rows; f32[R, K] each."""
    attention = tree_attention if loss.attention == "blocked" else dense_tree_attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return attention(q, k, v, jnp.asarray(batch.end)), cache

    out = apply(graphdef, params, jnp.asarray(batch.tokens), jnp.asarray(batch.position), attend)
    return token_logprobs(
        functools.partial(apply_logits, graphdef, params),
        out.hidden,
        batch.pred,
        batch.target,
        batch.temperature,
        loss.logit_chunk,
    )


def loss_sums(
    graphdef: nnx.GraphDef[Qwen3], loss: LossConfig, params: Any, batch: TreeBatch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of some rows (a plain sum of W_v l_v) and sums and maxima for the metrics."""
    scored = score_rows(graphdef, loss, params, batch)
    mask = jnp.asarray(batch.mask)
    weight = jnp.where(mask, batch.weight, 0.0)
    new = jnp.where(mask, scored.logprobs, 0.0)
    old = jnp.where(mask, batch.old_logprobs, 0.0)
    if loss.kind == SFT:
        objective = new * batch.advantage
        clipped = jnp.zeros_like(mask)
        old = new  # there is no older policy to drift from
    else:
        surrogate = clipped_surrogate(
            new, old, batch.advantage,
            clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip,
        )  # fmt: skip
        correction = truncated_importance(old, batch.rollout_logprobs, loss.correction_cap)
        objective = correction * surrogate.objective
        clipped = surrogate.clipped
    drift = log_ratio(new, old)
    sums = {
        "tokens": jnp.sum(mask),
        "clipped": jnp.sum(clipped & mask),
        "entropy": jnp.sum(jnp.where(mask, scored.entropy, 0.0)),
        "kl_old_k3": jnp.sum(jnp.where(mask, jnp.expm1(drift) - drift, 0.0)),
        "nll": -jnp.sum(new),
    }
    return -jnp.sum(weight * objective), sums


class TrainStep:
    """Programs compiled for one model, loss and optimiser."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        optimizer: optax.GradientTransformation,
        loss: LossConfig,
        micro_rows: int = 1,
    ) -> None:
        """micro_rows: rows in one forward and backward pass."""
        self.loss = loss
        self.micro_rows = micro_rows
        self._score = jax.jit(functools.partial(score_rows, graphdef, loss))
        gradient = jax.value_and_grad(
            functools.partial(loss_sums, graphdef, loss), argnums=0, has_aux=True
        )
        self._accumulate = jax.jit(functools.partial(_accumulate, gradient), donate_argnums=(1,))
        self._apply = jax.jit(functools.partial(_apply, optimizer), donate_argnums=(0,))
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))

    def old_logprobs(self, params: Any, batch: TreeBatch) -> np.ndarray:
        """f32[R, K]: the training engine's log-probs, 0 at padding."""
        parts = [np.asarray(self._score(params, m).logprobs) for m in batch.micro(self.micro_rows)]
        if not parts:
            return np.zeros(batch.mask.shape, np.float32)
        scored = np.concatenate(parts)[: batch.rows]
        return np.where(batch.mask, scored, 0.0).astype(np.float32)

    def update(self, state: TrainState, batch: TreeBatch) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step on a batch; `state` is consumed."""
        grads = self._zeros(state.params)
        losses, sums = [], []
        for micro in batch.micro(self.micro_rows):
            grads, value, parts = self._accumulate(state.params, grads, micro)
            losses.append(value)
            sums.append(parts)
        state, norms = self._apply(state, grads)
        return state, _summary(losses, sums, norms)


def _accumulate(gradient: Any, params: Any, grads: Any, batch: TreeBatch) -> tuple[Any, Any, Any]:
    (value, sums), new = gradient(params, batch)
    return jax.tree.map(jnp.add, grads, new), value, sums


def _apply(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any
) -> tuple[TrainState, dict[str, jax.Array]]:
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"grad_norm": optax.global_norm(grads), "update_norm": optax.global_norm(updates)}
    return TrainState(params, opt_state, state.updates + 1), norms


def _summary(
    losses: Sequence[jax.Array], sums: Sequence[dict[str, jax.Array]], norms: dict[str, jax.Array]
) -> dict[str, float]:
    """Sums over micro-steps as per-token means."""
    host = jax.device_get((list(losses), list(sums), norms))
    tokens = max(float(sum(s["tokens"] for s in host[1])), 1.0)
    out = {name: float(value) for name, value in host[2].items()}
    out["loss"] = float(sum(host[0]))
    out["trained_tok"] = float(sum(s["tokens"] for s in host[1]))
    for name, key in (
        ("clip_share", "clipped"),
        ("entropy", "entropy"),
        ("kl_old", "kl_old_k3"),
        ("nll", "nll"),
    ):
        out[name] = float(sum(s[key] for s in host[1])) / tokens
    return out


def logprob_check(batch: TreeBatch) -> dict[str, float]:
    """How far the engine that sampled and the engine that trains disagree."""
    mask = np.asarray(batch.mask)
    gap = np.abs(np.asarray(batch.old_logprobs) - np.asarray(batch.rollout_logprobs))[mask]
    if not gap.size:
        return {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.0}
    return {"logprob_gap_max": float(gap.max()), "logprob_gap_mean": float(gap.mean())}

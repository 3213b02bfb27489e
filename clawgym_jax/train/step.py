"""The programs of the two models that are trained: the policy's and the value model's.

Not here: how programs are made and run (`machine`), what they compute (`policy`, `critic`).
Invariant: metrics are means over the whole batch, however it was cut into passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.losses.value import explained_variance
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Qwen3
from clawgym_jax.train import critic, mesh, policy
from clawgym_jax.train.critic import CriticConfig
from clawgym_jax.train.machine import Metrics, Step, check_room, guarded
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.state import TrainState


class TrainStep(Step):
    """The policy's programs."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        optimizer: optax.GradientTransformation,
        loss: LossConfig,
        micro_rows: int = 1,
        parallel: Parallel | None = None,
        row_tok: int | None = None,
    ) -> None:
        """On a mesh `graphdef` is the one made with the same `parallel`."""
        super().__init__(
            functools.partial(policy.loss_sums, graphdef, loss),
            functools.partial(policy.forward_and_score, graphdef, loss),
            optimizer,
            micro_rows,
            row_tok,
            parallel,
        )
        self.loss = loss
        load = functools.partial(policy.load_of_rows, graphdef, loss, parallel=parallel)
        self._load_rows: Any = jax.jit(load) if parallel is None else mesh.total(parallel, load)

    def logprobs(self, params: Any, batch: TreeBatch) -> np.ndarray:
        """f32[R, K]: log-probs of the trainable tokens, 0 at padding."""
        if not batch.rows:
            return np.zeros(batch.mask.shape, np.float32)
        found = self.scores(params, batch).logprobs
        return np.where(batch.mask, found, 0.0).astype(np.float32)

    def update(
        self, state: TrainState, parts: Sequence[TreeBatch], load: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """One optimiser step, with per-token means for the metrics."""
        if load is None and self.loss.balance_coef:
            load = self.load(state.params, parts)
        state, sums = super().update(state, parts, load)
        return state, _policy_summary(sums)

    def load(self, params: Any, parts: Sequence[TreeBatch]) -> jax.Array:
        """f / sum W, f32[L, E], of the whole batch under the weights that are about to change."""
        total: Any = 0.0
        with guarded():
            for part in parts:
                for micro in self.micros(part):
                    found, overflow = self._load_rows(params, micro)
                    host, rows = jax.device_get((found, overflow))
                    check_room([rows])
                    total = total + host.astype(np.float64)
        weight = sum(float(np.sum(part.balance, dtype=np.float64)) for part in parts)
        share = np.asarray(total / max(weight, 1e-20) ** 2, np.float32)
        if self._parallel is None:
            placed: jax.Array = jax.device_put(share)
            return placed
        return mesh.everywhere(self._parallel, share)


class ValueStep(Step):
    """The value model's programs."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        optimizer: optax.GradientTransformation,
        config: CriticConfig,
        micro_rows: int = 1,
        parallel: Parallel | None = None,
        row_tok: int | None = None,
    ) -> None:
        """graphdef: of `critic.trunk_config`."""
        super().__init__(
            functools.partial(critic.value_sums, graphdef, config),
            functools.partial(critic.value_rows, graphdef, config),
            optimizer,
            micro_rows,
            row_tok,
            parallel,
        )

    def values(self, params: Any, batch: TreeBatch) -> np.ndarray:
        """f32[R, K]: V before each trainable token, 0 at padding."""
        if not batch.rows:
            return np.zeros(batch.mask.shape, np.float32)
        return np.asarray(self.scores(params, batch), np.float32)

    def update(
        self, state: TrainState, parts: Sequence[TreeBatch], load: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """One optimiser step; the sums of `losses.value.explained_variance_sums` are returned."""
        state, sums = super().update(state, parts)
        named = {"value_loss": sums.pop("loss"), "value_grad_norm": sums.pop("grad_norm")}
        return state, named | {name: x for name, x in sums.items() if name.startswith("ev_")}


def value_summary(updates: Sequence[Metrics]) -> Metrics:
    """Of some updates of the value model together: their batches as one."""
    total = {n: sum(u[n] for u in updates) for n in updates[0] if n.startswith("ev_")}
    error = total["ev_error2"] / max(total["ev_weight"], 1e-20)
    return {
        "value_loss": float(np.mean([u["value_loss"] for u in updates])),
        "value_grad_norm": float(np.mean([u["value_grad_norm"] for u in updates])),
        "value_error_rms": max(error, 0.0) ** 0.5,
        "explained_variance": explained_variance(total),
    }


def _policy_summary(sums: Metrics) -> Metrics:
    """Per-token means of what is a sum."""
    tokens = max(sums.pop("tokens", 0.0), 1.0)
    out = {name: sums[name] for name in ("grad_norm", "update_norm", "loss")}
    out["trained_tok"] = tokens
    for name in ("clipped", "entropy", "kl_old", "nll", "kl_ref"):
        if name in sums:
            out["clip_share" if name == "clipped" else name] = sums[name] / tokens
    out |= {name: sums[name] for name in ("ratio_max", "ratio_min", "balance") if name in sums}
    if sums.get("replayed"):
        out["strayed_routes"] = sums["strayed"] / sums["replayed"]
    return out


def logprob_check(batch: TreeBatch) -> dict[str, float]:
    """How far the engine that sampled and the engine that trains disagree."""
    mask = np.asarray(batch.mask)
    gap = np.abs(np.asarray(batch.old_logprobs) - np.asarray(batch.rollout_logprobs))[mask]
    if not gap.size:
        return {"logprob_gap_max": 0.0, "logprob_gap_mean": 0.0}
    return {"logprob_gap_max": float(gap.max()), "logprob_gap_mean": float(gap.mean())}

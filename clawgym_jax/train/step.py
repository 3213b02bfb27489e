"""The jitted programs of training: old log-probs, gradients of a micro-step, the update.

One program serves supervised learning and GRPO: supervised learning is the same packed rows with
advantage 1 and no ratio. Gradients are sums over micro-steps, the weights W being fixed over the
whole batch beforehand, so any split into micro-steps gives the same update.
Not here: batches (`batch`), the order of things (`loop`), several chips (`mesh`).
Invariant: one compilation per program and row shape.
Source: ClawGym II, equations 8 to 10; the shared tree-loss law.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import CapacityError, ConfigError
from clawgym_jax.losses.correction import log_ratio, truncated_importance
from clawgym_jax.losses.policy import clipped_surrogate
from clawgym_jax.model.attention_choice import NAMES, choose_attention
from clawgym_jax.model.logprobs import TokenLogprobs, token_logprobs
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Qwen3, apply, make_head
from clawgym_jax.model.sharding import X
from clawgym_jax.train import mesh
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
    attention: str = "auto"  # a name of model.attention_choice
    logit_chunk: int = 512  # trainable tokens whose logits exist at one time, per row

    def __post_init__(self) -> None:
        if self.kind not in (GRPO, SFT):
            raise ConfigError(f'loss.kind: expected "{GRPO}" or "{SFT}", got {self.kind!r}')
        if self.attention not in NAMES:
            raise ConfigError(
                f"loss.attention: expected one of {', '.join(NAMES)}, got {self.attention!r}"
            )


def score_rows(
    graphdef: nnx.GraphDef[Qwen3], loss: LossConfig, params: Any, batch: TreeBatch
) -> TokenLogprobs:
    """Log-probs of the trainable tokens of packed rows; f32[R, K] each."""
    return _forward(graphdef, loss, params, batch)[0]


def _forward(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
) -> tuple[TokenLogprobs, jax.Array | None]:
    """`score_rows` of one device or one chip of a mesh, and `Output.overflow`."""
    attention, end = choose_attention(loss.attention), jnp.asarray(batch.end)

    def on_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, end)

    attend_rows = on_rows if parallel is None else parallel.over_heads(on_rows)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return attend_rows(q, k, v), cache

    out = apply(graphdef, params, jnp.asarray(batch.tokens), jnp.asarray(batch.position), attend)
    scored = token_logprobs(
        make_head(graphdef, params),
        out.hidden,
        batch.pred,
        batch.target,
        batch.temperature,
        loss.logit_chunk,
        None if parallel is None else X,
    )
    return scored, out.overflow


def loss_sums(
    graphdef: nnx.GraphDef[Qwen3],
    loss: LossConfig,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of some rows (a plain sum of W_v l_v) and sums for the metrics."""
    scored, overflow = _forward(graphdef, loss, params, batch, parallel)
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
    if overflow is not None:
        sums[mesh.OVERFLOW] = overflow
    return -jnp.sum(weight * objective), sums


class TrainStep:
    """Programs compiled for one model, loss and optimiser."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        optimizer: optax.GradientTransformation,
        loss: LossConfig,
        micro_rows: int = 1,
        parallel: Parallel | None = None,
    ) -> None:
        """micro_rows: rows in one forward and backward pass, of all chips together.

        On a mesh `graphdef` is the one made with the same `parallel`.
        """
        self.loss = loss
        self.micro_rows = micro_rows
        self._parallel = parallel
        score = functools.partial(_forward, graphdef, loss, parallel=parallel)
        objective = functools.partial(loss_sums, graphdef, loss, parallel=parallel)
        self._score: Any
        self._accumulate: Any
        if parallel is None:
            self._score = jax.jit(score)
            gradient = jax.value_and_grad(objective, has_aux=True)
            accumulate = functools.partial(_accumulate, gradient)
            self._accumulate = jax.jit(accumulate, donate_argnums=(1,))
        else:
            mesh.check_rows(parallel, micro_rows)
            self._score = mesh.score(parallel, score)
            self._accumulate = mesh.accumulate(parallel, objective)
        apply = functools.partial(_apply, optimizer, parallel)
        self._apply = jax.jit(apply, donate_argnums=(0,))
        self._zeros = jax.jit(functools.partial(_zeros, parallel))

    def old_logprobs(self, params: Any, batch: TreeBatch) -> np.ndarray:
        """f32[R, K]: the training engine's log-probs, 0 at padding."""
        parts, overflows = [], []
        for micro in self._micro(batch):
            scored, overflow = self._score(params, micro)
            parts.append(np.asarray(scored.logprobs))
            overflows.append(overflow)
        _check_room(overflows)
        if not parts:
            return np.zeros(batch.mask.shape, np.float32)
        logprobs = np.concatenate(parts)[: batch.rows]
        return np.where(batch.mask, logprobs, 0.0).astype(np.float32)

    def update(self, state: TrainState, batch: TreeBatch) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step on a batch; `state` is consumed."""
        grads = self._zeros(state.params)
        losses, sums = [], []
        for micro in self._micro(batch):
            grads, value, parts = self._accumulate(state.params, grads, micro)
            losses.append(value)
            sums.append(parts)
        _check_room([parts.pop(mesh.OVERFLOW, None) for parts in sums])  # before weights change
        state, norms = self._apply(state, grads)
        return state, _summary(losses, sums, norms)

    def _micro(self, batch: TreeBatch) -> Iterator[TreeBatch]:
        for micro in batch.micro(self.micro_rows):
            yield micro if self._parallel is None else mesh.place_rows(self._parallel, micro)

    def lower(self, state: TrainState, batch: TreeBatch) -> dict[str, jax.stages.Lowered]:
        """The programs for a state and one pass's rows, arrays or only shapes, by name."""
        return {
            "old_logprobs": self._score.lower(state.params, batch),
            "accumulate": self._accumulate.lower(state.params, state.params, batch),
            "apply": self._apply.lower(state, state.params),
        }


def _accumulate(gradient: Any, params: Any, grads: Any, batch: TreeBatch) -> tuple[Any, Any, Any]:
    (value, sums), new = gradient(params, batch)
    return jax.tree.map(jnp.add, grads, new), value, sums


def _zeros(parallel: Parallel | None, params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros if parallel is None else mesh.keep_placed(parallel, zeros)


def _apply(
    optimizer: optax.GradientTransformation,
    parallel: Parallel | None,
    state: TrainState,
    grads: Any,
) -> tuple[TrainState, dict[str, jax.Array]]:
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
    new = TrainState(params, opt_state, state.updates + 1)
    return (new, norms) if parallel is None else mesh.keep_placed(parallel, (new, norms))


def _check_room(overflows: Sequence[jax.Array | None]) -> None:
    """Raises CapacityError if any expert's chip got more rows than it has room for."""
    rows = sum(int(count) for count in overflows if count is not None)
    if rows:
        raise CapacityError(
            f"{rows} rows of tokens found no room at their experts' chips, expected 0: routing is "
            "less even than mesh.expert_buffer allows; raise it. Nothing was updated."
        )


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

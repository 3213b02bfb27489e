"""Packed rows plus weights and advantages -> the columns of a TreeBatch.

Not here: what the weights are (`from_episodes`), what only a model can tell (`scored`).
Invariant: a number of a call or rollout reaches its own trainable tokens and no others.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import LogprobError
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.pack import PackedRows


def at_calls(rows: PackedRows, values: np.ndarray) -> np.ndarray:
    """f[len(rows.calls)] -> f32[R, K], 0 at padding."""
    return _spread(rows.mask, values, rows.call)


def at_rollouts(rows: PackedRows, values: np.ndarray) -> np.ndarray:
    """f[B], B the rollouts that were packed -> f32[R, K], 0 at padding."""
    return _spread(rows.mask, values, rows.rollout)


def _spread(mask: np.ndarray, values: np.ndarray, index: np.ndarray) -> np.ndarray:
    if not len(values):
        return np.zeros(mask.shape, np.float32)
    spread = np.asarray(values)[np.where(mask, index, 0)]
    return np.asarray(np.where(mask, spread, 0.0), np.float32)


def fill(
    rows: PackedRows,
    weight: np.ndarray,  # f32[R, K], 0 at padding
    advantage: np.ndarray,  # f32[R, K], 0 at padding
    routes: np.ndarray | None = None,  # i16[R, L, N, k]
) -> TreeBatch:
    """Old log-probs are the rollout's until `scored.set_old`. Raises LogprobError."""
    for call in rows.calls:
        _check_logprobs(call)
    mask = rows.mask
    logprobs, temperature = _sampled(rows)
    target = np.take_along_axis(rows.tokens, np.where(mask, rows.target, 0), axis=1)
    unused = np.zeros(mask.shape, np.float32)
    return TreeBatch(
        tokens=rows.tokens,
        position=rows.position,
        end=rows.end,
        balance=balance(rows, weight),
        target=np.where(mask, target, 0).astype(np.int32),
        pred=rows.pred,
        mask=mask,
        weight=weight,
        advantage=advantage,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.copy(),
        ref_logprobs=unused,
        correction=np.ones(mask.shape, np.float32),
        old_values=unused.copy(),
        returns=unused.copy(),
        temperature=temperature,
        routes=routes,
    )


def balance(rows: PackedRows, weight: np.ndarray) -> np.ndarray:
    """f32[R, N]: the sum of `weight` over the trainable tokens whose pred a token is."""
    out = np.zeros(rows.tokens.shape, np.float64)
    r, k = np.nonzero(rows.pred >= 0)
    np.add.at(out, (r, rows.pred[r, k]), weight[r, k])
    return out.astype(np.float32)


def _sampled(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """The engine's log-probs and temperature of each trainable token, f32[R, K] each."""
    if not rows.calls:
        return np.zeros(rows.mask.shape, np.float32), np.ones(rows.mask.shape, np.float32)
    call, offset = np.where(rows.mask, rows.call, 0), np.where(rows.mask, rows.offset, 0)
    starts = np.cumsum([0, *(c.completion_tok for c in rows.calls)])
    flat = np.concatenate([c.completion.logprobs for c in rows.calls]).astype(np.float32)
    logprobs = np.where(rows.mask, flat[starts[call] + offset], 0.0)
    per_call = np.array([c.effective.temperature for c in rows.calls], np.float32)
    temperature = np.where(rows.mask, per_call[call], 1.0)
    return logprobs.astype(np.float32), temperature.astype(np.float32)


def _check_logprobs(call: CallRecord) -> None:
    """Known fault A14: missing or misaligned log-probs are an error, never padded."""
    done = call.completion
    n = len(done.ids)
    for name in ("logprobs", "raw_logprobs", "versions"):
        got = len(getattr(done, name))
        if got != n:
            raise LogprobError(
                f"call {call.call_id}: {n} sampled tokens but {got} {name}; "
                "this episode cannot be trained on"
            )
    if not np.all(np.isfinite(done.logprobs)):
        raise LogprobError(f"call {call.call_id} has a log-prob that is not finite")
    if call.effective.temperature <= 0:
        raise LogprobError(
            f"call {call.call_id} was sampled greedily (temperature 0): "
            "there is no policy gradient; expected a positive temperature"
        )

"""What only a model can tell, put into a minibatch: old log-probs, reference log-probs, values.

Not here: the forward passes themselves (`train`). Parts of a minibatch are filled together: a
rollout's calls may lie in several rows and parts.
Invariant: columns that are not named stay as they are; padding stays 0 (correction 1).
Source: ClawGym II, equation 10 (correction) and its PPO; drift and advantages are of `losses`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.batch.fill import at_calls
from clawgym_jax.batch.tree_batch import Minibatch, Part
from clawgym_jax.core.errors import LedgerError
from clawgym_jax.core.types import Role
from clawgym_jax.losses.correction import corrections, drift
from clawgym_jax.losses.gae import tree_gae
from clawgym_jax.tree.pack import PackedRows

_WHITEN_EPS = 1e-8


def set_old(
    minibatch: Minibatch, old_logprobs: Sequence[np.ndarray], config: BatchConfig
) -> tuple[Minibatch, dict[str, float]]:
    """Fills old_logprobs and correction; f32[R, K] per part. The numbers are `drift`'s."""
    _check_parts(minibatch, old_logprobs, "old_logprobs")
    filled = []
    for part, given in zip(minibatch, old_logprobs, strict=True):
        rows, rollout = part.rows, part.arrays.rollout_logprobs
        old = np.where(rows.mask, given, 0.0).astype(np.float32)
        weight, _ = corrections(old, rollout, rows.call, config.correction)
        filled.append(part.replace(old_logprobs=old, correction=weight))
    calls = _renumbered([part.rows for part in filled])
    metrics = drift(
        _together([part.arrays.old_logprobs[part.rows.mask] for part in filled]),
        _together([part.arrays.rollout_logprobs[part.rows.mask] for part in filled]),
        calls,
        config.correction,
    )
    return tuple(filled), metrics


def set_ref(minibatch: Minibatch, ref_logprobs: Sequence[np.ndarray]) -> Minibatch:
    """Fills ref_logprobs; f32[R, K] per part."""
    _check_parts(minibatch, ref_logprobs, "ref_logprobs")
    return tuple(
        part.replace(ref_logprobs=np.where(part.rows.mask, given, 0.0).astype(np.float32))
        for part, given in zip(minibatch, ref_logprobs, strict=True)
    )


def set_values(
    minibatch: Minibatch, values: Sequence[np.ndarray], config: BatchConfig
) -> tuple[Minibatch, dict[str, float]]:
    """Fills old_values, returns and advantage by `tree_gae`; values f[R, K] per part, at `pred`.

    config: gamma, lam, whiten_advantages (over the minibatch's trained tokens, each counted once;
    returns are not whitened), auxiliary_weight (after whitening).
    """
    _check_parts(minibatch, values, "values")
    advantage, returns = _estimate(minibatch, values, config)
    if config.whiten_advantages and advantage:
        flat = _together(list(advantage.values()))
        mean, std = flat.mean(), flat.std()
        advantage = {c: (a - mean) / (std + _WHITEN_EPS) for c, a in advantage.items()}
    filled = []
    for part, given in zip(minibatch, values, strict=True):
        share = auxiliary(part.rows, config.auxiliary_weight)
        filled.append(
            part.replace(
                old_values=np.where(part.rows.mask, given, 0.0).astype(np.float32),
                returns=_to_slots(part.rows, returns),
                advantage=share * _to_slots(part.rows, advantage),
            )
        )
    return tuple(filled), _value_metrics(filled)


def auxiliary(rows: PackedRows, weight: float) -> np.ndarray:
    """f32[R, K]: `weight` at tokens of auxiliary calls, 1 at the main agent's, 0 at padding."""
    factor = np.array([1.0 if c.role is Role.MAIN else weight for c in rows.calls], np.float32)
    return at_calls(rows, factor)


def _estimate(
    minibatch: Minibatch, values: Sequence[np.ndarray], config: BatchConfig
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """call id -> advantages, call id -> returns; f64[C]."""
    of_call: dict[str, np.ndarray] = {}
    for part, given in zip(minibatch, values, strict=True):
        of_call |= _from_slots(part.rows, np.asarray(given, np.float64))
    advantage: dict[str, np.ndarray] = {}
    returns: dict[str, np.ndarray] = {}
    for rollout in minibatch[0].rollouts if minibatch else ():
        lost = [c for c in rollout.call_ids if c not in of_call]
        if lost:
            raise LedgerError(f"no value for calls {lost[:3]}: expected all parts of a minibatch")
        a, r = tree_gae(
            [of_call[c] for c in rollout.call_ids],
            rollout.before, rollout.ends, rollout.reward, config.gamma, config.lam,
        )  # fmt: skip
        advantage |= dict(zip(rollout.call_ids, a, strict=True))
        returns |= dict(zip(rollout.call_ids, r, strict=True))
    extra = sorted(of_call.keys() - advantage.keys())
    if extra:
        raise LedgerError(f"calls {extra[:3]} are of no rollout: expected parts of `build_batch`")
    return advantage, returns


def _slots(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Rows and slots of the trainable tokens, ordered by call, then by offset."""
    r, k = np.nonzero(rows.mask)
    order = np.lexsort((rows.offset[r, k], rows.call[r, k]))
    return r[order], k[order]


def _from_slots(rows: PackedRows, values: np.ndarray) -> dict[str, np.ndarray]:
    """f64[R, K] -> call id: f64[C]"""
    borders = np.cumsum([c.completion_tok for c in rows.calls])[:-1]
    pieces = np.split(values[_slots(rows)], borders) if rows.calls else []
    return {call.call_id: piece for call, piece in zip(rows.calls, pieces, strict=True)}


def _to_slots(rows: PackedRows, of_call: dict[str, np.ndarray]) -> np.ndarray:
    """call id: f64[C] -> f32[R, K], 0 at padding."""
    out = np.zeros(rows.mask.shape, np.float32)
    out[_slots(rows)] = _together([of_call[call.call_id] for call in rows.calls])
    return out


def _renumbered(rows: Sequence[PackedRows]) -> np.ndarray:
    """i32[tokens]: numbers of calls that are unique over the parts."""
    shifts = np.cumsum([0, *(len(part.calls) for part in rows)])
    numbers = [part.call[part.mask] + s for part, s in zip(rows, shifts[:-1], strict=True)]
    return _together(numbers).astype(np.int64)


def _together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)


def _value_metrics(parts: Sequence[Part]) -> dict[str, float]:
    columns = ("advantage", "returns", "old_values")
    a, r, v = (_together([getattr(p.arrays, n)[p.rows.mask] for p in parts]) for n in columns)
    if not a.size:
        return {}
    spread = float(np.var(r))
    return {
        "advantage_mean": float(a.mean()),
        "advantage_std": float(a.std()),
        "return_mean": float(r.mean()),
        "value_mean": float(v.mean()),
        "old_explained_variance": 1.0 - float(np.var(r - v)) / spread if spread else float("nan"),
    }


def _check_parts(minibatch: Minibatch, columns: Sequence[np.ndarray], name: str) -> None:
    expected = [part.rows.mask.shape for part in minibatch]
    got = [np.shape(column) for column in columns]
    if expected != got:
        raise ValueError(f"{name}: expected an array per part, shapes {expected}; got {got}")

"""Differences of log-probs that stay finite, and the rollout correction built on them.

The engine that samples and the engine that trains compute slightly different policies; a correction
weighs each token by how likely the trainer finds what the engine sampled. It is a constant of the
loss. The jnp functions are for programs, `corrections` and `drift` for the host, once a step.
Not here: the ratio of the update itself (`policy`).
Invariant: no input of log-probs, -inf included, gives a NaN or an infinity.
Source: token: ClawGym II, equation 10 (truncated importance sampling). sequence, sequence_mask:
Liu et al. 2025, "When speed kills stability". icepop: Ling team 2025, "Every step evolves".
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from clawgym_jax.core.errors import ConfigError

MAX_LOG_RATIO = 20.0
OFF, TOKEN, SEQUENCE, SEQUENCE_MASK, ICEPOP = "off", "token", "sequence", "sequence_mask", "icepop"
KINDS = (OFF, TOKEN, SEQUENCE, SEQUENCE_MASK, ICEPOP)


@dataclass(frozen=True)
class CorrectionConfig:
    """ratio = pi_old / pi_rollout of a token.

    token: min(ratio, cap). sequence: min(product of the call's ratios, cap) for all its tokens.
    sequence_mask: 1, but 0 for a call whose geometric mean ratio is outside [low, cap].
    icepop: ratio, but 0 for a token whose ratio is outside [low, cap].
    """

    kind: str = TOKEN
    cap: float = 2.0  # c_bar; not public in the paper: ours
    low: float = 0.5  # of sequence_mask and icepop only

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"correction.kind: expected one of {', '.join(KINDS)}; got {self.kind!r}"
            )
        if not 0.0 <= self.low < self.cap:
            raise ConfigError(
                f"correction: expected 0 <= low < cap, got low={self.low}, cap={self.cap}; "
                'to switch the correction off set kind="off"'
            )


def log_ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """log p - log q, clamped to +-20; equal infinities differ by 0. Any shape, f32."""
    difference = jnp.nan_to_num(
        numerator - denominator, nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO
    )
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def corrections(
    old: np.ndarray, rollout: np.ndarray, call: np.ndarray, config: CorrectionConfig
) -> tuple[np.ndarray, np.ndarray]:
    """-> (weight f32[...], kept bool[...]), 1 and True at padding.

    old, rollout: f32[...] log-probs; call: i32[...] number of the call that sampled the token, -1
    at padding. All tokens of a call must be here: sequence kinds sum over them.
    """
    if not old.shape == rollout.shape == call.shape:
        raise ValueError(
            f"expected equal shapes, got old {old.shape}, rollout {rollout.shape}, "
            f"call {call.shape}"
        )
    real = call >= 0
    log = np.where(real, host_log_ratio(old, rollout), 0.0)
    weight, kept = np.ones(call.shape, np.float64), np.ones(call.shape, bool)
    match config.kind:
        case "token":
            weight = np.minimum(np.exp(log), config.cap)
        case "sequence":
            total = _over_calls(log, call, mean=False)
            bounded = np.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            weight = np.minimum(np.exp(bounded), config.cap)
        case "sequence_mask":
            kept = _inside(np.exp(_over_calls(log, call, mean=True)), config)
            weight = kept.astype(np.float64)
        case "icepop":
            kept = _inside(np.exp(log), config)
            weight = np.where(kept, np.exp(log), 0.0)
    return np.where(real, weight, 1.0).astype(np.float32), kept | ~real


def drift(
    old: np.ndarray, rollout: np.ndarray, call: np.ndarray, config: CorrectionConfig
) -> dict[str, float]:
    """How far the two engines are apart, and what the correction does about it. Same arguments.

    rollout_kl_*: estimates of KL(rollout || old) per token, its samples being the rollout's.
    correction_capped: share of tokens whose weight is the cap; _masked: whose weight is 0.
    """
    weight, kept = corrections(old, rollout, call, config)
    real = call >= 0
    log = host_log_ratio(old, rollout)[real]
    if not log.size:
        log = np.zeros(1)
    capped = weight[real] >= np.float32(config.cap)
    if config.kind not in (TOKEN, SEQUENCE):
        capped = np.zeros_like(capped)
    return {
        "rollout_kl_k1": float(np.mean(-log)),
        "rollout_kl_k3": float(np.mean(np.expm1(log) - log)),
        "rollout_ratio_max": float(np.exp(log.max())),
        "rollout_ratio_min": float(np.exp(log.min())),
        "correction_mean": float(weight[real].mean()) if real.any() else 1.0,
        "correction_capped": float(capped.mean()) if real.any() else 0.0,
        "correction_masked": float((~kept[real]).mean()) if real.any() else 0.0,
    }


def host_log_ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """`log_ratio` in numpy, f64[...]."""
    with np.errstate(invalid="ignore"):
        difference = numerator.astype(np.float64) - denominator.astype(np.float64)
    difference = np.nan_to_num(difference, nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)
    return np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _over_calls(log: np.ndarray, call: np.ndarray, mean: bool) -> np.ndarray:
    """Each call's sum (or mean) of `log`, given back to each of its tokens. f64[...]"""
    slot = call.ravel() + 1  # padding is slot 0
    weights = (
        1.0 / np.maximum(np.bincount(slot), 1) if mean else np.ones(int(slot.max(initial=0)) + 1)
    )
    total = np.bincount(slot, weights=log.ravel() * weights[slot])
    return np.asarray(total[slot].reshape(call.shape))


def _inside(ratio: np.ndarray, config: CorrectionConfig) -> np.ndarray:
    return np.asarray((ratio >= config.low) & (ratio <= config.cap))

"""Differences of log-probs that stay finite, and the rollout correction built on them.

Invariant: no input of log-probs, -inf included, gives a NaN or an infinity.
Source: ClawGym II, equation 10 (truncated importance sampling between the engine that sampled and
the engine that trains).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0


def log_ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """log p - log q, clamped to +-20; equal infinities differ by 0. Any shape, f32."""
    difference = jnp.nan_to_num(
        numerator - denominator, nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO
    )
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_importance(
    old_logprobs: jax.Array, rollout_logprobs: jax.Array, cap: float
) -> jax.Array:
    """w_t = min(exp(log pi_old - log pi_rollout), cap), a constant of the loss. f32[...]

    cap: c_bar of the paper (its value is not public); 0 switches the correction off (w = 1).
    """
    if cap == 0.0:
        return jnp.ones_like(old_logprobs)
    weight = jnp.minimum(jnp.exp(log_ratio(old_logprobs, rollout_logprobs)), cap)
    return jax.lax.stop_gradient(weight)

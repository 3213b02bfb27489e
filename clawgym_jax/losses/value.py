"""The loss of the value model and how well it predicts returns, per token.

Not here: returns themselves (`gae`), which token reads which state (V is read at `pred`).
Invariant: at V = returns the loss and its gradient are 0, whatever the clip.
Source: ClawGym II (value loss (V - R)^2); clip of the value: Schulman's PPO code (Engstrom et al.
2020, "Implementation matters").
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, eps: float = 0.0
) -> jax.Array:
    """0.5 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) per token, f32[...].

    eps: 0 = no clip, 0.5 (v - R)^2. The paper has (v - R)^2; the half is a matter of the
    coefficient in front.
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"expected equal shapes, got values {values.shape}, old {old_values.shape}, "
            f"returns {returns.shape}"
        )
    plain = jnp.square(values - returns)
    if eps == 0.0:
        return 0.5 * plain
    old = jax.lax.stop_gradient(old_values)
    near = jnp.square(jnp.clip(values, old - eps, old + eps) - returns)
    return 0.5 * jnp.maximum(plain, near)


def explained_variance_sums(
    values: jax.Array, returns: jax.Array, weight: jax.Array
) -> dict[str, jax.Array]:
    """Weighted sums that add up over micro-steps and chips; weight 0 at padding."""
    error = returns - values
    return {
        "ev_weight": jnp.sum(weight),
        "ev_return": jnp.sum(weight * returns),
        "ev_return2": jnp.sum(weight * jnp.square(returns)),
        "ev_error": jnp.sum(weight * error),
        "ev_error2": jnp.sum(weight * jnp.square(error)),
    }


def explained_variance(sums: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R) from added-up sums; NaN where returns do not vary."""
    total = float(sums["ev_weight"])
    if total <= 0.0:
        return float("nan")
    spread = float(sums["ev_return2"]) / total - (float(sums["ev_return"]) / total) ** 2
    left = float(sums["ev_error2"]) / total - (float(sums["ev_error"]) / total) ** 2
    floor = 1e-6 * float(sums["ev_return2"]) / total  # below it is rounding of f32 sums
    return float("nan") if spread <= floor else float(np.float64(1.0 - left / spread))

"""The clipped surrogate and the supervised loss, per token.

Not here: which tokens, with which weight (`batch`); log-probs (`model.logprobs`).
Invariant: a token whose advantage is 0 has a gradient of 0.
Source: PPO (Schulman et al. 2017, eq. 7); ClawGym II, equations 8 to 10; dual clip: Ye et al. 2020.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clawgym_jax.losses.correction import log_ratio


class Surrogate(NamedTuple):
    """Per token, any shape."""

    objective: jax.Array  # f32[...], to be maximised
    ratio: jax.Array  # f32[...], pi_new / pi_old
    clipped: jax.Array  # bool[...], True where the clip cut the gradient


def clipped_surrogate(
    new_logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantage: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); rho = exp(new - old).

    dual_clip: c > 1 bounds the objective from below by c A where A < 0; 0 = off.
    """
    if not new_logprobs.shape == old_logprobs.shape == advantage.shape:
        raise ValueError(
            f"expected equal shapes, got new {new_logprobs.shape}, old {old_logprobs.shape}, "
            f"advantage {advantage.shape}"
        )
    ratio = jnp.exp(log_ratio(new_logprobs, jax.lax.stop_gradient(old_logprobs)))
    plain = ratio * advantage
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    objective = jnp.minimum(plain, bounded)
    clipped = bounded < plain
    if dual_clip:
        floor = dual_clip * advantage
        clipped = clipped | ((advantage < 0) & (objective < floor))
        objective = jnp.where(advantage < 0, jnp.maximum(objective, floor), objective)
    return Surrogate(objective, ratio, clipped)

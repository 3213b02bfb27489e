"""Estimators of KL(pi || pi_ref) from sampled tokens, per token.

Invariant: finite for any log-probs; k3 is never negative.
Source: J. Schulman, "Approximating KL divergence" (2020), k1 to k3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clawgym_jax.losses.correction import log_ratio


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str = "k3") -> jax.Array:
    """f32[...]; kind: "k1" = log p - log q, "k2" = half its square, "k3" = q/p - 1 - log q/p."""
    difference = log_ratio(ref_logprobs, logprobs)  # log q / p
    match kind:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * jnp.square(difference)
        case "k3":
            return jnp.expm1(difference) - difference
    raise ValueError(f'unknown KL estimator {kind!r}; expected "k1", "k2" or "k3"')

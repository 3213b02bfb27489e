"""Estimators of KL(pi || pi_ref) from sampled tokens, per token.

As values all three estimate KL(pi || pi_ref) for samples of pi (k2 with a bias). As losses, by
their gradient on such samples (p = pi, q = pi_ref, s = grad log p):
    k1  s             says nothing of q and is 0 on average: do not use it as a loss
    k2  log(p/q) s    the gradient of KL(pi || pi_ref), unbiased
    k3  (1 - q/p) s   on average the gradient of KL(pi_ref || pi), the other direction
Multiplied by the ratio pi_new / pi_old with its gradient, k3 gets k2's (on policy exactly).
k1 belongs into the reward or advantage, as a constant. Beyond +-20 the gradient is 0 (`log_ratio`).
Invariant: finite for any log-probs; k3 is never negative.
Source: J. Schulman, "Approximating KL divergence" (2020), k1 to k3; gradients: Tang and Munos
2025, "On a few pitfalls in KL divergence gradient estimation for RL".
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

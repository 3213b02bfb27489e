"""Losses by hand-computed cases, finite under any log-probs, and against rlax-style references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.advantage import NO_TOKEN, SMALL_GROUP, UNGRADED, group_advantages
from clawgym_jax.losses.correction import log_ratio, truncated_importance
from clawgym_jax.losses.kl import kl_estimate
from clawgym_jax.losses.policy import clipped_surrogate

LOGPROB = st.floats(-60, 0, width=32)


def test_a_group_is_normalised_by_its_population_std() -> None:
    out = group_advantages([1.0, 0.0, 0.0, 0.0], ["g"] * 4, [5] * 4, eps=0.0)
    std = np.sqrt(3) / 4
    np.testing.assert_allclose(out.advantage, np.array([0.75, -0.25, -0.25, -0.25]) / std, 1e-6)
    assert out.in_loss.all()


def test_a_forked_rollout_counts_once() -> None:
    """Known fault A8: rewards 1, 1, 1, 0, the first three being branches of one rollout."""
    out = group_advantages([1.0, 0.0], ["g", "g"], [30, 10], scale_by_std=False)
    np.testing.assert_allclose(out.advantage, [0.5, -0.5])


def test_ungraded_rollouts_are_in_neither_baseline_nor_loss() -> None:
    """Known fault A9."""
    out = group_advantages([1.0, None, 0.0], ["g"] * 3, [1] * 3, scale_by_std=False)
    np.testing.assert_allclose(out.advantage, [0.5, 0.0, -0.5])
    assert out.out == ("", UNGRADED, "")


def test_a_group_of_one_is_dropped() -> None:
    out = group_advantages([1.0, 1.0, 0.0], ["a", "b", "b"], [1] * 3)
    assert out.out == (SMALL_GROUP, "", "")
    assert out.counts["dropped groups"] == 1
    ungraded = group_advantages([1.0, None], ["a", "a"], [1] * 2)
    assert ungraded.out == (SMALL_GROUP, UNGRADED)


def test_no_trainable_token_leaves_the_loss_but_not_the_baseline() -> None:
    out = group_advantages([1.0, 0.0], ["g", "g"], [0, 4], scale_by_std=False)
    assert out.out == (NO_TOKEN, "")
    np.testing.assert_allclose(out.advantage, [0.0, -0.5])


def test_zero_variance_groups_stay_with_zero_advantage() -> None:
    out = group_advantages([1.0, 1.0], ["g", "g"], [1, 1])
    assert out.in_loss.all()
    assert not out.advantage.any()
    assert out.counts["zero-variance groups"] == 1


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_advantages_of_a_kept_group_sum_to_zero(rewards: list[float]) -> None:
    out = group_advantages(rewards, ["g"] * len(rewards), [1] * len(rewards), scale_by_std=False)
    assert abs(float(out.advantage.sum())) < 1e-5


@given(LOGPROB, LOGPROB, st.floats(-3, 3))
def test_the_surrogate_is_the_formula(new: float, old: float, advantage: float) -> None:
    out = clipped_surrogate(
        jnp.array([new]), jnp.array([old]), jnp.array([advantage]), clip_low=0.2, clip_high=0.28
    )
    ratio = np.exp(np.clip(np.float32(new) - np.float32(old), -20, 20))
    expected = min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    np.testing.assert_allclose(float(out.objective[0]), expected, rtol=1e-4, atol=1e-5)


def test_the_clip_cuts_the_gradient_on_the_right_side() -> None:
    def gradient(new: float, advantage: float) -> float:
        def objective(x: jax.Array) -> jax.Array:
            return clipped_surrogate(
                x, jnp.zeros(1), jnp.full(1, advantage), clip_low=0.2, clip_high=0.28
            ).objective[0]

        return float(jax.grad(objective)(jnp.full(1, new))[0])

    assert gradient(0.3, 1.0) == 0.0
    assert gradient(0.3, -1.0) < 0.0
    assert gradient(-0.3, 1.0) > 0.0
    assert gradient(-0.3, -1.0) == 0.0


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    out = clipped_surrogate(
        jnp.array([3.0]),
        jnp.zeros(1),
        jnp.array([-1.0]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert float(out.objective[0]) == -3.0
    assert bool(out.clipped[0])


@pytest.mark.parametrize("difference", [60.0, -60.0, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_any_difference_stays_finite(difference: float, kind: str) -> None:
    """Known fault A15, loss and gradients."""
    value, gradient = jax.value_and_grad(lambda x: kl_estimate(x, jnp.float32(0.0), kind))(
        jnp.float32(difference)
    )
    assert np.isfinite(float(value))
    assert np.isfinite(float(gradient))
    surrogate, gradient = jax.value_and_grad(
        lambda x: clipped_surrogate(
            x[None], jnp.zeros(1), -jnp.ones(1), clip_low=0.2, clip_high=0.2
        ).objective[0]
    )(jnp.float32(difference))
    assert np.isfinite(float(surrogate))
    assert np.isfinite(float(gradient))


@given(LOGPROB, LOGPROB)
def test_k3_is_never_negative_and_estimators_agree_near_zero(a: float, b: float) -> None:
    assert float(kl_estimate(jnp.float32(a), jnp.float32(b), "k3")) >= 0.0
    near = kl_estimate(jnp.float32(a), jnp.float32(a - 1e-3), "k3")
    np.testing.assert_allclose(float(near), 0.5e-6, rtol=0.3)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k1"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")


def test_the_correction_is_capped_and_constant() -> None:
    old, rollout = jnp.array([-1.0, -1.0, -2.0]), jnp.array([-1.0, -3.0, -1.0])
    weight = truncated_importance(old, rollout, 2.0)
    np.testing.assert_allclose(weight, [1.0, 2.0, np.exp(-1.0)], rtol=1e-6)
    np.testing.assert_array_equal(truncated_importance(old, rollout, 0.0), np.ones(3))
    gradient = jax.grad(lambda x: truncated_importance(x, rollout, 2.0).sum())(old)
    assert not gradient.any()
    assert float(log_ratio(jnp.array(-jnp.inf), jnp.array(-jnp.inf))) == 0.0

"""Losses by hand-computed cases, finite under any log-probs, and against rlax-style references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.kl import kl_estimate
from clawgym_jax.losses.policy import clipped_surrogate

LOGPROB = st.floats(-60, 0, width=32)


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


def categorical(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a policy and of its reference over 6 outcomes, f64."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=6), rng.normal(size=6)


def expected_gradient(kind: str, logits: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """Of the estimator used as a loss: the mean over the policy's samples of its gradient."""

    def mean(x: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(x)
        estimate = kl_estimate(logprobs, jax.nn.log_softmax(jnp.asarray(ref)), kind)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs)) * estimate)

    return np.asarray(jax.grad(mean)(jnp.asarray(logits)))


def kl(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(a) * (a - b))


@pytest.mark.parametrize("seed", range(4))
def test_what_each_estimator_descends_as_a_loss(seed: int) -> None:
    """k1: nothing. k2: KL(pi, ref). k3: KL(ref, pi). As the module says; f64, 1e-12."""
    with jax.enable_x64(True):
        logits, ref = categorical(seed)
        q = jax.nn.log_softmax(jnp.asarray(ref))
        reverse = jax.grad(lambda x: kl(jax.nn.log_softmax(x), q))(jnp.asarray(logits))
        forward = jax.grad(lambda x: kl(q, jax.nn.log_softmax(x)))(jnp.asarray(logits))
        np.testing.assert_allclose(expected_gradient("k1", logits, ref), np.zeros(6), atol=1e-12)
        np.testing.assert_allclose(expected_gradient("k2", logits, ref), reverse, atol=1e-12)
        np.testing.assert_allclose(expected_gradient("k3", logits, ref), forward, atol=1e-12)

        def k3_times_ratio(x: jax.Array) -> jax.Array:
            p = jax.nn.log_softmax(x)
            ratio = jnp.exp(p - jax.lax.stop_gradient(p))
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * ratio * kl_estimate(p, q, "k3"))

        np.testing.assert_allclose(
            jax.grad(k3_times_ratio)(jnp.asarray(logits)), reverse, atol=1e-12
        )
        assert np.abs(forward - reverse).max() > 0.01  # the two directions do differ


@given(LOGPROB, LOGPROB)
def test_estimators_are_their_formulas_with_gradient(a: float, b: float) -> None:
    """Against numpy in f64, where nothing is clamped; relative 1e-6 of the largest term."""
    with jax.enable_x64(True):
        d = b - a  # log q / p
        formulas = {
            "k1": (-d, 1.0),
            "k2": (0.5 * d * d, -d),
            "k3": (np.exp(d) - 1.0 - d, 1.0 - np.exp(d)),
        }
        for kind, (value, slope) in formulas.items():
            got = jax.value_and_grad(lambda x, k=kind: kl_estimate(x, jnp.float64(b), k))(
                jnp.float64(a)
            )
            if abs(d) < 20.0:
                scale = 1e-9 * (1.0 + np.exp(d))
                np.testing.assert_allclose(got, (value, slope), rtol=1e-6, atol=scale)
            assert np.isfinite(got).all()

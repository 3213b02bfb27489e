"""The value loss by hand and against numpy; explained variance from sums that add up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.value import explained_variance, explained_variance_sums, value_loss

NUMBER = st.floats(-2, 2, width=32)


def loss_and_slope(v: float, old: float, r: float, eps: float) -> tuple[float, float]:
    value, slope = jax.value_and_grad(
        lambda x: value_loss(x[None], jnp.array([old]), jnp.array([r]), eps)[0]
    )(jnp.float32(v))
    return float(value), float(slope)


def test_without_a_clip_it_is_half_the_square() -> None:
    assert loss_and_slope(0.5, 100.0, 2.0, 0.0) == (1.125, -1.5)


def test_the_clip_takes_the_worse_and_cuts_the_gradient() -> None:
    # Moved past the clip towards R: the clipped error is the larger one, no gradient.
    assert loss_and_slope(1.0, 0.0, 2.0, 0.5) == (1.125, 0.0)
    # Moved past the clip away from R: the plain error is the larger one, full gradient.
    assert loss_and_slope(-1.0, 0.0, 2.0, 0.5) == (4.5, -3.0)
    # Within the clip both are the same.
    assert loss_and_slope(0.25, 0.0, 2.0, 0.5)[0] == 0.5 * 1.75**2


@given(NUMBER, NUMBER, NUMBER, st.floats(0, 1, width=32))
def test_the_formula_in_double_precision(v: float, old: float, r: float, eps: float) -> None:
    near = np.clip(v, old - eps, old + eps) if eps else v
    expected = 0.5 * max((v - r) ** 2, (near - r) ** 2)
    np.testing.assert_allclose(loss_and_slope(v, old, r, eps)[0], expected, rtol=1e-5, atol=1e-6)


def test_old_values_get_no_gradient() -> None:
    slope = jax.grad(lambda o: value_loss(jnp.ones(1), o, jnp.array([2.0]), 0.1)[0])(jnp.zeros(1))
    assert not slope.any()


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        value_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(1))


def test_explained_variance_adds_up_over_micro_steps() -> None:
    """Against numpy in f64; relative 1e-4, the sums being f32."""
    rng = np.random.default_rng(0)
    returns = rng.uniform(size=40)
    values = returns + 0.2 * rng.normal(size=40) + 0.3
    weight = rng.uniform(size=40) * (np.arange(40) < 35)
    sums: dict[str, float] = {}
    for part in np.split(np.arange(40), [10, 17]):
        for name, value in explained_variance_sums(
            *(jnp.asarray(x[part], jnp.float32) for x in (values, returns, weight))
        ).items():
            sums[name] = sums.get(name, 0.0) + float(value)

    def variance(x: np.ndarray) -> float:
        mean = np.average(x, weights=weight)
        return float(np.average((x - mean) ** 2, weights=weight))

    expected = 1.0 - variance(returns - values) / variance(returns)
    np.testing.assert_allclose(explained_variance(sums), expected, rtol=1e-4)


def test_explained_variance_of_a_perfect_and_of_no_prediction() -> None:
    returns, weight = jnp.array([0.0, 1.0, 1.0]), jnp.ones(3)
    assert explained_variance(explained_variance_sums(returns, returns, weight)) == 1.0
    constant = explained_variance_sums(jnp.full(3, 7.0), returns, weight)
    assert explained_variance(constant) == pytest.approx(0.0, abs=1e-4)
    same = explained_variance_sums(returns, jnp.full(3, 0.7), weight)
    assert np.isnan(explained_variance(same))
    assert np.isnan(explained_variance(explained_variance_sums(returns, returns, jnp.zeros(3))))

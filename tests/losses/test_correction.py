"""The rollout correction: by hand, against the jnp form, finite under any log-probs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.losses.correction import (
    KINDS,
    CorrectionConfig,
    corrections,
    drift,
    host_log_ratio,
    log_ratio,
)

LOGPROB = st.floats(-60, 0, width=32) | st.just(float("-inf"))
PAIRS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=8)
CALLS = np.array([[0, 0, 1, -1], [2, 2, 2, -1]], np.int32)
LOG = np.log(np.array([[4.0, 0.25, 3.0, 1.0], [1.5, 0.9, 0.4, 1.0]], np.float32))  # old - rollout


def weights(kind: str, **changes: float) -> tuple[np.ndarray, np.ndarray]:
    return corrections(LOG, np.zeros_like(LOG), CALLS, CorrectionConfig(kind, **changes))


def test_off_is_one_everywhere() -> None:
    weight, kept = weights("off")
    np.testing.assert_array_equal(weight, np.ones((2, 4)))
    assert kept.all()


def test_tokens_are_capped() -> None:
    weight, kept = weights("token")
    np.testing.assert_allclose(weight, [[2, 0.25, 2, 1], [1.5, 0.9, 0.4, 1]], rtol=1e-6)
    assert kept.all()


def test_a_call_shares_the_product_of_its_ratios() -> None:
    """1 = 4 x 0.25; 3 is capped; 0.54 = 1.5 x 0.9 x 0.4. Calls are apart within a row."""
    weight, kept = weights("sequence")
    np.testing.assert_allclose(weight, [[1, 1, 2, 1], [0.54, 0.54, 0.54, 1]], rtol=1e-6)
    assert kept.all()


def test_a_call_is_masked_by_its_geometric_mean() -> None:
    """1 stays; 3 is out; 0.54 ** (1 / 3) = 0.814 stays, though 0.54's own bound would be 0.6."""
    weight, kept = weights("sequence_mask", low=0.6)
    np.testing.assert_array_equal(weight, [[1, 1, 0, 1], [1, 1, 1, 1]])
    np.testing.assert_array_equal(kept, [[True, True, False, True], [True] * 4])
    weight, _ = weights("sequence_mask", low=0.82)
    np.testing.assert_array_equal(weight[1], [0, 0, 0, 1])


def test_icepop_masks_tokens_and_leaves_the_others_their_ratio() -> None:
    weight, kept = weights("icepop")
    np.testing.assert_allclose(weight, [[0, 0, 0, 1], [1.5, 0.9, 0, 1]], rtol=1e-6)
    np.testing.assert_array_equal(kept, weight > 0)


def test_the_numbers_of_the_drift() -> None:
    zeros = np.zeros_like(LOG)
    out = drift(LOG, zeros, CALLS, CorrectionConfig("token"))
    real = LOG[CALLS >= 0].astype(np.float64)
    np.testing.assert_allclose(out["rollout_kl_k1"], -real.mean(), rtol=1e-6)
    np.testing.assert_allclose(out["rollout_kl_k3"], np.mean(np.exp(real) - 1 - real), rtol=1e-6)
    np.testing.assert_allclose(out["rollout_ratio_max"], 4.0, rtol=1e-6)
    np.testing.assert_allclose(out["rollout_ratio_min"], 0.25, rtol=1e-6)
    assert out["correction_capped"] == pytest.approx(2 / 6)
    assert out["correction_masked"] == 0.0
    icepop = drift(LOG, zeros, CALLS, CorrectionConfig("icepop"))
    assert icepop["correction_masked"] == pytest.approx(4 / 6)
    assert icepop["correction_capped"] == 0.0
    for kind in ("off", "sequence_mask"):  # a weight of 1 is no cap, even where the cap is 1
        none = drift(LOG, zeros, CALLS, CorrectionConfig(kind, cap=1.0))
        assert none["correction_capped"] == 0.0
    sequence = drift(LOG, zeros, CALLS, CorrectionConfig("sequence"))
    assert sequence["correction_capped"] == pytest.approx(1 / 6)


def test_an_empty_batch_has_no_drift() -> None:
    out = drift(LOG, LOG + 1, np.full_like(CALLS, -1), CorrectionConfig())
    assert out["rollout_ratio_max"] == out["correction_mean"] == 1.0
    assert out["rollout_kl_k3"] == out["correction_capped"] == 0.0


@given(PAIRS, st.floats(0.6, 10))
def test_the_host_form_is_the_programs(pairs: list[tuple[float, float]], cap: float) -> None:
    """1e-6 relative in the difference of log-probs, that f32 rounds; so 1e-5 in the weight."""
    old, rollout = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    call = np.zeros(len(pairs), np.int32)
    weight, _ = corrections(old, rollout, call, CorrectionConfig("token", cap=cap))
    ratio = jnp.exp(log_ratio(jnp.asarray(old), jnp.asarray(rollout)))
    expected = jnp.minimum(ratio, cap)  # equation 10
    np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-7)


@given(PAIRS, st.sampled_from(KINDS))
def test_any_logprobs_stay_finite(pairs: list[tuple[float, float]], kind: str) -> None:
    """Known fault A15, on the host: 60 and -inf, alone and summed over a call."""
    old, rollout = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    call = np.arange(len(pairs), dtype=np.int32) // 3
    config = CorrectionConfig(kind)
    weight, _ = corrections(old, rollout, call, config)
    assert np.isfinite(weight).all()
    assert (weight >= 0).all()
    assert (weight <= max(config.cap, 1.0)).all()
    assert all(np.isfinite(v) for v in drift(old, rollout, call, config).values())


@pytest.mark.parametrize("difference", [60.0, -60.0, np.inf, -np.inf])
def test_the_programs_form_is_finite_with_its_gradient(difference: float) -> None:
    """Known fault A15."""
    value, gradient = jax.value_and_grad(log_ratio)(jnp.float32(difference), jnp.float32(0.0))
    assert abs(float(value)) == 20.0
    assert float(gradient) == 0.0
    assert abs(float(host_log_ratio(np.float32(difference), np.float32(0.0)))) == 20.0


def test_the_correction_is_capped() -> None:
    old = np.array([-1.0, -1.0, -2.0], np.float32)
    rollout = np.array([-1.0, -3.0, -1.0], np.float32)
    call = np.zeros(3, np.int32)
    weight, _ = corrections(old, rollout, call, CorrectionConfig("token", cap=2.0))
    np.testing.assert_allclose(weight, [1.0, 2.0, np.exp(-1.0)], rtol=1e-6)
    weight, _ = corrections(old, rollout, call, CorrectionConfig("off"))
    np.testing.assert_array_equal(weight, np.ones(3))
    assert float(log_ratio(jnp.array(-jnp.inf), jnp.array(-jnp.inf))) == 0.0


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="icepop"):
        CorrectionConfig("tokens")
    with pytest.raises(ConfigError, match="low < cap"):
        CorrectionConfig(cap=0.0)
    with pytest.raises(ConfigError, match="low < cap"):
        dataclasses.replace(CorrectionConfig(), low=3.0)
    with pytest.raises(ValueError, match="equal shapes"):
        corrections(LOG, LOG[:1], CALLS, CorrectionConfig())

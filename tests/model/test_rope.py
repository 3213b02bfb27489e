"""Rotary embedding against transformers' tables, and what YaRN does to which pairs."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_config, rope
from tests.model.hf_cases import FIXTURES

CASES: dict[str, Any] = json.loads((FIXTURES / "rope.json").read_text(encoding="utf-8"))
TABLES = safetensors.numpy.load_file(FIXTURES / "rope.safetensors")
BASE = hf_config.to_hf(model_config.QWEN3_8B.replace(param_dtype="float32"))
PLAIN = model_config.QWEN3_8B.replace(dtype=jnp.float32)
YARN = model_config.Yarn(factor=4.0, original_max_position_embeddings=32768)


def _config(case: str) -> model_config.Qwen3Config:
    base = {key: value for key, value in BASE.items() if key != "rope_theta"}
    return hf_config.from_hf(base | CASES[case]["config"])


@pytest.mark.parametrize("case", list(CASES))
def test_frequencies_are_those_of_transformers(case: str) -> None:
    """The same float32 numbers, but for one at most, where torch's power is not rounded best."""
    got, factor = rope.inverse_frequencies(_config(case))
    assert got.dtype == np.float32
    np.testing.assert_array_max_ulp(got, TABLES[f"{case}.inv_freq"], maxulp=2)
    assert np.sum(got != TABLES[f"{case}.inv_freq"]) <= 1
    assert factor == pytest.approx(CASES[case]["attention_factor"], rel=1e-15)


@pytest.mark.parametrize("case", list(CASES))
def test_cos_and_sin_are_those_of_transformers(case: str) -> None:
    """At positions up to 131,071, where one frequency off by one rounding shows (measured 4e-6)."""
    cos, sin = rope.rotary(jnp.asarray(TABLES["positions"])[None], _config(case))
    for got, name in ((cos, "cos"), (sin, "sin")):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got[0, :, 0], TABLES[f"{case}.{name}"], rtol=0, atol=1e-5)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, one = rope.inverse_frequencies(PLAIN)
    stretched, factor = rope.inverse_frequencies(PLAIN.replace(yarn=YARN))
    ratio = plain / stretched
    np.testing.assert_array_equal(ratio[:20], 1)
    np.testing.assert_allclose(ratio[-20:], 4, rtol=1e-6)
    assert np.all(np.diff(ratio) >= 0)
    assert one == 1 and factor == pytest.approx(1.1386294361)


@given(
    shift=st.integers(0, 30_000),
    apart=st.integers(0, 3_000),
    yarn=st.sampled_from([None, YARN]),
)
def test_attention_sees_only_how_far_tokens_are_apart(
    shift: int, apart: int, yarn: model_config.Yarn | None
) -> None:
    config = PLAIN.replace(yarn=yarn)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 128)), jnp.float32) for _ in range(2))

    def score(at: int) -> float:
        there, here = (rope.rotary(jnp.asarray([[p]]), config) for p in (at, at + apart))
        return float(jnp.sum(rope.rotate(q, here) * rope.rotate(k, there)))

    assert score(shift) == pytest.approx(score(0), abs=0.05)  # angles are rounded to 0.002


def test_angles_are_float32_where_activations_are_bfloat16() -> None:
    positions = jnp.asarray([[40_000, 40_001]])
    low = rope.rotary(positions, PLAIN.replace(dtype=jnp.bfloat16))
    exact = rope.rotary(positions, PLAIN)
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))

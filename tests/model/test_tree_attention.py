"""Blocked tree attention equals the dense oracle, gradients included, on random forests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.model import attention, tree_attention
from tests.model import forests

LENGTH, HEADS, GROUPS, WIDTH = 50, 4, 2, 8  # a length that no block divides
BLOCKS = [(8, 8), (16, 8), (8, 16), (128, 128)]


def _inputs(shape: tuple[int, ...], dtype: Any, width: int = WIDTH) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(*shape, h, width) for h in (HEADS, GROUPS, GROUPS, HEADS)]
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(
    blocks: tuple[int, ...] | None, end: jax.Array, *inputs: jax.Array
) -> tuple[jax.Array, ...]:
    """Output and the three gradients, of the blocked form or (None) of the oracle."""
    *qkv, upstream = inputs

    def attend(*qkv: jax.Array) -> jax.Array:
        if blocks is None:
            return attention.dense_tree_attention(*qkv, end)
        return tree_attention.tree_attention(*qkv, end, *blocks)

    out, pull_back = jax.vjp(attend, *qkv)
    return out, *pull_back(upstream)


def _compare(
    end: np.ndarray, dtype: Any, tolerance: float, blocks: tuple[int, ...], width: int = WIDTH
) -> None:
    inputs = _inputs(end.shape, dtype, width)
    got = _with_gradients(blocks, jnp.asarray(end), *inputs)
    expected = _with_gradients(None, jnp.asarray(end), *inputs)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@given(end=forests.forests(LENGTH), blocks=st.sampled_from(BLOCKS))
def test_equals_the_oracle_in_float32(end: np.ndarray, blocks: tuple[int, int]) -> None:
    _compare(end, jnp.float32, 1e-5, blocks)


@given(end=forests.forests(LENGTH), blocks=st.sampled_from(BLOCKS))
def test_equals_the_oracle_in_float64(end: np.ndarray, blocks: tuple[int, int]) -> None:
    with jax.enable_x64(True):
        _compare(end, jnp.float64, 1e-12, blocks)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [100, 200, 300, 650])
def test_blocks_of_its_own_choice_fit_any_length(length: int, width: int) -> None:
    end = forests.end_of(forests.grow(np.random.default_rng(length), length, 4, 0.1))[None]
    with jax.enable_x64(True):
        _compare(end, jnp.float64, 1e-12, (), width)


def test_bfloat16_stays_close() -> None:
    end = forests.end_of(forests.grow(np.random.default_rng(0), 64, 4, 0.1))[None]
    q, k, v, _ = _inputs(end.shape, jnp.bfloat16)
    got = tree_attention.tree_attention(q, k, v, jnp.asarray(end), 16, 16)
    precise = (x.astype(jnp.float32) for x in (q, k, v))
    expected = attention.dense_tree_attention(*precise, jnp.asarray(end))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.03)


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k, v, _ = _inputs((1, 4), jnp.float32)
    with pytest.raises(ValueError, match="expected q"):
        tree_attention.tree_attention(q, k, v, jnp.ones((1, 5), jnp.int32))
    with pytest.raises(ValueError, match="multiple of the 2"):
        tree_attention.tree_attention(q[:, :, :3], k, v, jnp.ones((1, 4), jnp.int32))

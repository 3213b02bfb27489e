"""The implementations of the experts agree, gradients included, and drop nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.model import grouped, grouped_tpu, moe

E, K, D, F = 5, 2, 8, 6


def _problem(tokens: int, seed: int) -> tuple[jax.Array, moe.Experts, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    params = moe.Experts(
        *(jnp.asarray(rng.normal(size=s)) for s in ((E, D, F), (E, D, F), (E, F, D)))
    )
    logits = jnp.asarray(rng.normal(size=(tokens, E)))
    logits = logits.at[:, 0].add(-1e3 if seed % 2 else 0.0)  # at times an expert gets nothing
    weights, chosen = moe.route(logits, K, normalise=True)
    return jnp.asarray(rng.normal(size=(tokens, D))), params, weights, chosen


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(
    kind: moe.Implementation,
    x: jax.Array,
    params: moe.Experts,
    weights: jax.Array,
    chosen: jax.Array,
) -> Any:
    def total(x: jax.Array, params: moe.Experts, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = moe.experts(x, params, weights, chosen, kind)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(x, params, weights)


@settings(max_examples=15)
@given(tokens=st.sampled_from([1, 37]), seed=st.integers(0, 99))
@pytest.mark.parametrize("kind", ["gather", "sorted"])
def test_equals_all_experts(kind: moe.Implementation, tokens: int, seed: int) -> None:
    with jax.enable_x64(True):
        problem = _problem(tokens, seed)
        got, expected = _with_gradients(kind, *problem), _with_gradients("every", *problem)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)


ROWS = 30


@functools.partial(jax.jit, static_argnums=0)
def _gmm_with_gradients(block: int | None, x: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
    inside = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]

    def total(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        if block is None:
            out = jax.lax.ragged_dot(x, w, sizes)
        else:
            out = grouped.block_gmm(x, w, sizes, block)
        out = jnp.where(inside, out, 0)  # rows beyond the groups are undefined
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(total, argnums=(0, 1), has_aux=True)(x, w)


@given(
    cuts=st.lists(st.integers(0, ROWS), min_size=4, max_size=4).map(sorted),
    block=st.sampled_from([1, 4, 64]),
)
def test_block_gmm_equals_ragged_dot(cuts: list[int], block: int) -> None:
    sizes = jnp.diff(jnp.asarray(cuts, jnp.int32), prepend=0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(4, D, F)), jnp.float32)
    got = _gmm_with_gradients(block, x, w, sizes)
    expected = _gmm_with_gradients(None, x, w, sizes)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("sizes", [[7, 0, 19, 30], [0, 0, 0, 5], [16, 16, 16, 16], [0, 0, 0, 0]])
def test_the_tpu_kernels_mean_the_same(sizes: list[int]) -> None:
    """Interpreted: what they compute, not that they compile (tests of the compiler do that)."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(64, n)), jnp.float32) for n in (128, 256))
    w = jnp.asarray(rng.normal(size=(4, 128, 256)), jnp.float32)
    inside = (jnp.arange(64) < sum(sizes))[:, None]
    counts = jnp.asarray(sizes, jnp.int32)
    expected, twin = jax.vjp(lambda x, w: grouped.block_gmm(x, w, counts), x, w)
    got, backward = jax.vjp(lambda x, w: grouped_tpu.kernel_gmm(x, w, counts, True), x, w)
    np.testing.assert_allclose(*(jnp.where(inside, y, 0) for y in (got, expected)), atol=1e-4)
    for a, b in zip(backward(dy), twin(dy), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(8192, 16), (4096, 8)],  # 64K a row over 8 and 16 chips
)
def test_the_tpu_kernels_waste_at_most_a_tenth(tokens: int, experts: int) -> None:
    """Rows that tiles cover over rows that there are, for a routing as good as even."""
    even = tokens * 8
    tile = grouped_tpu.row_tile(2 * even, experts)  # the buffer's size decides
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(even, rng.dirichlet(np.full(experts, 20.0)))
    stop = np.cumsum(sizes)
    covered = sum(-(-b // tile) - a // tile for a, b in zip(stop - sizes, stop, strict=True)) * tile
    assert covered / even <= 1.1
    for inner, outer in ((2048, 768), (768, 2048)):  # both weights' other axes: nothing padded
        for size, most in ((inner, 2048), (outer, 2048 * 768 // inner)):
            assert size % grouped_tpu._divisor(size, most) == 0


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x, params, weights, chosen = _problem(32, 3)
    crowded = jnp.zeros_like(chosen[1:]) + jnp.arange(K)  # all others want the same experts
    alone = moe.experts(x[:1], params, weights[:1], chosen[:1], "sorted")
    together = moe.experts(x, params, weights, jnp.concatenate([chosen[:1], crowded]), "sorted")
    np.testing.assert_allclose(together[:1], alone, atol=1e-5)


def test_gate_weights_of_the_top_experts_are_the_routes() -> None:
    logits = jax.random.normal(jax.random.key(0), (7, E))
    for normalise in (True, False):
        weights, chosen = moe.route(logits, K, normalise)
        np.testing.assert_allclose(moe.gate_weights(logits, chosen, normalise), weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 128, 8), "gather"), ((64, 8, 2), "every"), ((8192, 8, 2), "sorted")],
)
def test_choice_by_shape(shape: tuple[int, int, int], expected: str) -> None:
    assert moe.choose(*shape) == expected


def test_unknown_implementation_is_refused() -> None:
    x, params, weights, chosen = _problem(2, 0)
    with pytest.raises(ValueError, match="expected one of"):
        moe.experts(x, params, weights, chosen, "capacity")  # type: ignore[arg-type]

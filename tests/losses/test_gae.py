"""Tree GAE: by hand, against a recursive twin, and where forking must change nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.gae import NO_PARENT, tree_gae

SEEDS = st.integers(0, 2**32 - 1)
UNIT = st.floats(0, 1)


def leaf_counts(parents: list[int]) -> list[int]:
    counts = [int(i not in parents) for i in range(len(parents))]
    for i in range(len(parents) - 1, -1, -1):
        if parents[i] != NO_PARENT:
            counts[parents[i]] += counts[i]
    return counts


def random_tree(seed: int) -> tuple[list[np.ndarray], list[int], list[int]]:
    rng = random.Random(seed)
    parents = [rng.randint(-1, i - 1) for i in range(rng.randint(1, 8))]
    values = [np.array([rng.gauss(0, 1) for _ in range(rng.randint(1, 4))]) for _ in parents]
    return values, parents, leaf_counts(parents)


def twin(
    values: list[np.ndarray], parents: list[int], leaves: list[int],
    reward: float, gamma: float, lam: float,
) -> list[list[float]]:  # fmt: skip
    """The recursion written down token by token, from each token forward."""

    def advantage(call: int, t: int) -> float:
        v = values[call]
        if t + 1 < len(v):
            return gamma * v[t + 1] - v[t] + gamma * lam * advantage(call, t + 1)
        below = [c for c, p in enumerate(parents) if p == call]
        if not below:
            return reward - v[t]
        total = sum(leaves[c] for c in below)
        value = sum(leaves[c] * values[c][0] for c in below) / total
        ahead = sum(leaves[c] * advantage(c, 0) for c in below) / total
        return gamma * value - v[t] + gamma * lam * ahead

    return [[advantage(c, t) for t in range(len(v))] for c, v in enumerate(values)]


def test_one_call_by_hand() -> None:
    """V = 0.5, 0.25; R = 1; gamma 0.5, lambda 0.5: delta = -0.375, 0.75."""
    advantages, returns = tree_gae([np.array([0.5, 0.25])], [NO_PARENT], [1], 1.0, 0.5, 0.5)
    np.testing.assert_allclose(advantages[0], [-0.375 + 0.25 * 0.75, 0.75], rtol=1e-15)
    np.testing.assert_allclose(returns[0], [0.3125, 1.0], rtol=1e-15)


def test_a_fork_by_hand() -> None:
    """Root call V = 0.2; children: a leaf with V = 0.4, and one with two leaves, V = 0.1.

    gamma = 0.5, lambda = 1. Leaves: A = R - V. The second child: 0.5 V' - 0.1 + 0.5 A' with both
    grandchildren V' = 0.6, A' = 0.4, so 0.4. Mean at the fork with weights 1/3, 2/3: V = 0.2,
    A = 0.6/3 + 2 * 0.4/3 = 1.4/3.
    """
    values = [np.array([v]) for v in (0.2, 0.4, 0.1, 0.6, 0.6)]
    parents, leaves = [NO_PARENT, 0, 0, 2, 2], [3, 1, 2, 1, 1]
    advantages, _ = tree_gae(values, parents, leaves, 1.0, 0.5, 1.0)
    expected = [0.5 * 0.2 - 0.2 + 0.5 * 1.4 / 3, 0.6, 0.4, 0.4, 0.4]
    np.testing.assert_allclose(np.concatenate(advantages), expected, rtol=1e-14)


@given(SEEDS, UNIT)
def test_the_papers_setting_is_reward_minus_value_exactly(seed: int, reward: float) -> None:
    values, parents, leaves = random_tree(seed)
    advantages, returns = tree_gae(values, parents, leaves, reward)
    for a, r, v in zip(advantages, returns, values, strict=True):
        np.testing.assert_array_equal(a, reward - v)
        np.testing.assert_array_equal(r, np.full(len(v), reward))


@given(SEEDS, UNIT)
def test_the_recursion_tends_to_it(seed: int, reward: float) -> None:
    """The short cut above is no other formula: lambda next to 1 gives next to the same."""
    values, parents, leaves = random_tree(seed)
    exact, _ = tree_gae(values, parents, leaves, reward)
    near, _ = tree_gae(values, parents, leaves, reward, 1.0, float(np.nextafter(1.0, 0.0)))
    np.testing.assert_allclose(np.concatenate(near), np.concatenate(exact), atol=1e-12)


@given(SEEDS, UNIT, UNIT, UNIT)
def test_the_recursive_twin_agrees(seed: int, reward: float, gamma: float, lam: float) -> None:
    values, parents, leaves = random_tree(seed)
    advantages, returns = tree_gae(values, parents, leaves, reward, gamma, lam)
    expected = twin(values, parents, leaves, reward, gamma, lam)
    for a, r, v, e in zip(advantages, returns, values, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-12)
        np.testing.assert_allclose(r, np.array(e) + v, atol=1e-12)


@given(SEEDS, UNIT, UNIT, UNIT, st.integers(1, 4))
def test_equal_branches_are_the_chain(
    seed: int, reward: float, gamma: float, lam: float, copies: int
) -> None:
    """A chain of three calls whose second and third are there several times, beside each other."""
    rng = np.random.default_rng(seed)
    chain = [rng.normal(size=n) for n in (2, 3, 1)]
    expected, _ = tree_gae(chain, [NO_PARENT, 0, 1], [1, 1, 1], reward, gamma, lam)
    values, parents = [chain[0]], [NO_PARENT]
    for _ in range(copies):
        values += [chain[1], chain[2]]
        parents += [0, len(parents)]
    got, _ = tree_gae(values, parents, leaf_counts(parents), reward, gamma, lam)
    for i, a in enumerate(got):
        np.testing.assert_allclose(a, expected[0 if i == 0 else 1 + (i - 1) % 2], atol=1e-12)


def test_shapes_and_parents_are_checked() -> None:
    one = np.zeros(1)
    with pytest.raises(ValueError, match="earlier call"):
        tree_gae([one, one], [1, NO_PARENT], [1, 1], 0.0)
    with pytest.raises(ValueError, match="C > 0"):
        tree_gae([np.zeros(0)], [NO_PARENT], [1], 0.0)
    with pytest.raises(ValueError, match="per call"):
        tree_gae([one], [NO_PARENT, NO_PARENT], [1], 0.0)

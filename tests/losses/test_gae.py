"""GAE over calls: by hand, against a recursive twin, and where forking must change nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.gae import tree_gae

SEEDS = st.integers(0, 2**32 - 1)
UNIT = st.floats(0, 1)


def count_ends(before: list[list[int]]) -> list[int]:
    """For each call, of those that nothing goes on from: how many it is, or leads to."""

    def ends(call: int) -> set[int]:
        after = [c for c, calls in enumerate(before) if call in calls]
        return set().union(*map(ends, after)) if after else {call}

    return [len(ends(call)) for call in range(len(before))]


def random_order(seed: int) -> tuple[list[np.ndarray], list[list[int]], list[int]]:
    """Some calls start anew, most go on from one, some from two."""
    rng = random.Random(seed)
    before = [
        rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2]))) for i in range(rng.randint(1, 8))
    ]
    values = [np.array([rng.gauss(0, 1) for _ in range(rng.randint(1, 4))]) for _ in before]
    return values, before, count_ends(before)


def twin(
    values: list[np.ndarray], before: list[list[int]], ends: list[int],
    reward: float, gamma: float, lam: float,
) -> list[list[float]]:  # fmt: skip
    """The recursion written down token by token, from each token forward."""

    def advantage(call: int, t: int) -> float:
        v = values[call]
        if t + 1 < len(v):
            return gamma * v[t + 1] - v[t] + gamma * lam * advantage(call, t + 1)
        after = [c for c, calls in enumerate(before) if call in calls]
        if not after:
            return reward - v[t]
        total = sum(ends[c] for c in after)
        value = sum(ends[c] * values[c][0] for c in after) / total
        ahead = sum(ends[c] * advantage(c, 0) for c in after) / total
        return gamma * value - v[t] + gamma * lam * ahead

    return [[advantage(c, t) for t in range(len(v))] for c, v in enumerate(values)]


def test_one_call_by_hand() -> None:
    """V = 0.5, 0.25; R = 1; gamma 0.5, lambda 0.5: delta = -0.375, 0.75."""
    advantages, returns = tree_gae([np.array([0.5, 0.25])], [()], [1], 1.0, 0.5, 0.5)
    np.testing.assert_allclose(advantages[0], [-0.375 + 0.25 * 0.75, 0.75], rtol=1e-15)
    np.testing.assert_allclose(returns[0], [0.3125, 1.0], rtol=1e-15)


def test_a_fork_by_hand() -> None:
    """First call V = 0.2; behind it one that ends, V = 0.4, and one with two ends, V = 0.1.

    gamma = 0.5, lambda = 1. Ends: A = R - V. The one with two: 0.5 V' - 0.1 + 0.5 A' with both
    behind it V' = 0.6, A' = 0.4, so 0.4. Mean at the fork with weights 1/3, 2/3: V = 0.2,
    A = 0.6/3 + 2 * 0.4/3 = 1.4/3.
    """
    values = [np.array([v]) for v in (0.2, 0.4, 0.1, 0.6, 0.6)]
    before, ends = [[], [0], [0], [2], [2]], [3, 1, 2, 1, 1]
    advantages, _ = tree_gae(values, before, ends, 1.0, 0.5, 1.0)
    expected = [0.5 * 0.2 - 0.2 + 0.5 * 1.4 / 3, 0.6, 0.4, 0.4, 0.4]
    np.testing.assert_allclose(np.concatenate(advantages), expected, rtol=1e-14)


def test_merged_turns_by_hand() -> None:
    """V = 0.2; two calls go on from it, V = 0.4 and 0.1; the last goes on from both, V = 0.6.

    gamma = 0.5, lambda = 1, R = 1: A = 0.4 at the end; 0.5 * 0.6 - 0.4 + 0.2 = 0.1 and 0.4 before;
    at the start the mean of V is 0.25, of A 0.25: 0.125 - 0.2 + 0.125.
    """
    values = [np.array([v]) for v in (0.2, 0.4, 0.1, 0.6)]
    advantages, _ = tree_gae(values, [[], [0], [0], [1, 2]], [1, 1, 1, 1], 1.0, 0.5, 1.0)
    np.testing.assert_allclose(np.concatenate(advantages), [0.05, 0.1, 0.4, 0.4], rtol=1e-14)


@given(SEEDS, UNIT)
def test_the_papers_setting_is_reward_minus_value_exactly(seed: int, reward: float) -> None:
    values, before, ends = random_order(seed)
    advantages, returns = tree_gae(values, before, ends, reward)
    for a, r, v in zip(advantages, returns, values, strict=True):
        np.testing.assert_array_equal(a, reward - v)
        np.testing.assert_array_equal(r, np.full(len(v), reward))


@given(SEEDS, UNIT)
def test_the_recursion_tends_to_it(seed: int, reward: float) -> None:
    """The short cut above is no other formula: lambda next to 1 gives next to the same."""
    values, before, ends = random_order(seed)
    exact, _ = tree_gae(values, before, ends, reward)
    near, _ = tree_gae(values, before, ends, reward, 1.0, float(np.nextafter(1.0, 0.0)))
    np.testing.assert_allclose(np.concatenate(near), np.concatenate(exact), atol=1e-12)


@given(SEEDS, UNIT, UNIT, UNIT)
def test_the_recursive_twin_agrees(seed: int, reward: float, gamma: float, lam: float) -> None:
    values, before, ends = random_order(seed)
    advantages, returns = tree_gae(values, before, ends, reward, gamma, lam)
    expected = twin(values, before, ends, reward, gamma, lam)
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
    expected, _ = tree_gae(chain, [[], [0], [1]], [1, 1, 1], reward, gamma, lam)
    values, before = [chain[0]], [list[int]()]
    for _ in range(copies):
        values += [chain[1], chain[2]]
        before += [[0], [len(before)]]
    got, _ = tree_gae(values, before, count_ends(before), reward, gamma, lam)
    for i, a in enumerate(got):
        np.testing.assert_allclose(a, expected[0 if i == 0 else 1 + (i - 1) % 2], atol=1e-12)


def test_shapes_and_order_are_checked() -> None:
    one = np.zeros(1)
    for before in ([[1], []], [[], [1]], [[], [-1]]):
        with pytest.raises(ValueError, match="different earlier calls"):
            tree_gae([one, one], before, [1, 1], 0.0)
    with pytest.raises(ValueError, match="different earlier calls"):
        tree_gae([one, one], [[], [0, 0]], [1, 1], 0.0)
    with pytest.raises(ValueError, match="at least one end"):
        tree_gae([one], [[]], [0], 0.0)
    with pytest.raises(ValueError, match="C > 0"):
        tree_gae([np.zeros(0)], [[]], [1], 0.0)
    with pytest.raises(ValueError, match="per call"):
        tree_gae([one], [[], []], [1], 0.0)

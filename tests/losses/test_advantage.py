"""Groups: every rule of the shared definitions is a case here, and each is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.losses.advantage import (
    NO_TOKEN,
    SMALL_GROUP,
    UNGRADED,
    ZERO_VARIANCE,
    GroupConfig,
    group_advantages,
)

PLAIN = GroupConfig(scale_by_std=False)
REWARDS = st.lists(st.floats(0, 1), min_size=2, max_size=12)


def test_a_group_is_normalised_by_its_population_std() -> None:
    out = group_advantages([1.0, 0.0, 0.0, 0.0], ["g"] * 4, [5] * 4, GroupConfig(eps=0.0))
    std = np.sqrt(3) / 4
    np.testing.assert_allclose(out.advantage, np.array([0.75, -0.25, -0.25, -0.25]) / std, 1e-6)
    assert out.in_loss.all()
    assert out.counts == {"groups": 1, "dropped groups": 0, "zero-variance groups": 0}


def test_eps_is_added_to_the_deviation() -> None:
    out = group_advantages([1.0, 0.0], ["g"] * 2, [1] * 2, GroupConfig(eps=0.5))
    np.testing.assert_allclose(out.advantage, [0.5, -0.5])


def test_a_forked_rollout_counts_once() -> None:
    """Known fault A8: rewards 1, 1, 1, 0, the first three being branches of one rollout."""
    out = group_advantages([1.0, 0.0], ["g", "g"], [30, 10], PLAIN)
    np.testing.assert_allclose(out.advantage, [0.5, -0.5])


def test_ungraded_rollouts_are_in_neither_baseline_nor_loss() -> None:
    """Known fault A9."""
    out = group_advantages([1.0, None, 0.0], ["g"] * 3, [1] * 3, PLAIN)
    np.testing.assert_allclose(out.advantage, [0.5, 0.0, -0.5])
    assert out.out == ("", UNGRADED, "")
    assert out.counts[UNGRADED] == 1


def test_masked_rollouts_leave_the_baseline_too_under_their_own_reason() -> None:
    out = group_advantages([1.0, 0.2, 0.0], ["g"] * 3, [1] * 3, PLAIN, ["", "too wild", ""])
    np.testing.assert_allclose(out.advantage, [0.5, 0.0, -0.5])
    assert out.out == ("", "too wild", "")
    assert out.counts["too wild"] == 1


def test_a_group_of_one_is_dropped() -> None:
    out = group_advantages([1.0, 1.0, 0.0], ["a", "b", "b"], [1] * 3)
    assert out.out == (SMALL_GROUP, "", "")
    assert out.counts["dropped groups"] == 1
    assert out.counts[SMALL_GROUP] == 1
    ungraded = group_advantages([1.0, None], ["a", "a"], [1] * 2)
    assert ungraded.out == (SMALL_GROUP, UNGRADED)
    assert group_advantages([None, None], ["a", "a"], [1] * 2).counts["dropped groups"] == 1


def test_no_trainable_token_leaves_the_loss_but_not_the_baseline() -> None:
    out = group_advantages([1.0, 0.0], ["g", "g"], [0, 4], PLAIN)
    assert out.out == (NO_TOKEN, "")
    np.testing.assert_allclose(out.advantage, [0.0, -0.5])
    assert out.counts[NO_TOKEN] == 1


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_zero_variance_groups_stay_with_zero_advantage(eps: float) -> None:
    third = 1 / 3  # three times a third is not exactly their mean's sum in every order
    out = group_advantages([third] * 3, ["g"] * 3, [1] * 3, GroupConfig(eps=eps))
    assert out.in_loss.all()
    assert not out.advantage.any()
    assert out.counts["zero-variance groups"] == 1
    assert out.counts["groups"] == 1
    near = group_advantages(
        [0.3, 0.3 + 1e-16, 0.3 - 1e-16], ["g"] * 3, [1] * 3, GroupConfig(eps=eps)
    )
    assert not near.advantage.any()


def test_zero_variance_groups_can_be_dropped() -> None:
    config = GroupConfig(drop_uniform=True)
    out = group_advantages([1.0, 1.0, 1.0, 0.0], ["a", "a", "b", "b"], [1, 0, 1, 1], config)
    assert out.out == (ZERO_VARIANCE, NO_TOKEN, "", "")
    assert out.counts[ZERO_VARIANCE] == 1
    assert out.counts["zero-variance groups"] == 1


def test_the_baseline_of_a_rollout_can_be_the_others() -> None:
    config = GroupConfig(scale_by_std=False, leave_one_out=True)
    out = group_advantages([1.0, 0.5, 0.0, None], ["g"] * 4, [1] * 4, config)
    np.testing.assert_allclose(out.advantage, [0.75, 0.0, -0.75, 0.0])


@given(REWARDS)
def test_leave_one_out_by_its_definition(rewards: list[float]) -> None:
    config = GroupConfig(scale_by_std=False, leave_one_out=True, eps=0.0)
    out = group_advantages(rewards, ["g"] * len(rewards), [1] * len(rewards), config)
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(out.advantage, expected, atol=1e-6)


@given(REWARDS, st.booleans(), st.booleans())
def test_advantages_of_a_kept_group_sum_to_zero(
    rewards: list[float], scale: bool, leave_one_out: bool
) -> None:
    config = GroupConfig(scale_by_std=scale, leave_one_out=leave_one_out)
    out = group_advantages(rewards, ["g"] * len(rewards), [1] * len(rewards), config)
    assert abs(float(out.advantage.sum())) < 1e-4


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="a group per rollout"):
        group_advantages([1.0, 0.0], ["g"], [1, 1])
    with pytest.raises(ValueError, match="token count"):
        group_advantages([1.0, 0.0], ["g", "g"], [1])

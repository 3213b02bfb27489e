"""What only a model can tell, put into minibatches: per rollout, whatever the rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.batch.call_tree import turn_order
from clawgym_jax.batch.from_episodes import PPO, BatchConfig, build_batch
from clawgym_jax.batch.scored import set_old, set_ref, set_values
from clawgym_jax.batch.tree_batch import Minibatch, Part
from clawgym_jax.core.errors import LedgerError
from clawgym_jax.core.types import CallRecord, Episode, Role
from clawgym_jax.losses.correction import CorrectionConfig, drift
from clawgym_jax.losses.gae import tree_gae
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig
from tests.batch.episodes import (
    episode,
    forked_calls,
    presented_again,
    random_episodes,
    simple,
)
from tests.tree.histories import make_call

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
# Rows so short that one rollout lies in several.
CONFIG = BatchConfig(PackConfig(row_tok=72, train_tok=12, shorter=(36,)), KEEP_ALL, algorithm=PPO)
SEEDS = st.integers(0, 10**6)


def value_of(call_id: str, offset: int) -> float:
    """Any number that depends on call and offset only."""
    return float(np.sin(hash_of(call_id) + offset))


def hash_of(call_id: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(call_id))


def column(part: Part, scale: float = 1.0, padding: float = np.nan) -> np.ndarray:
    """f32[R, K] of `value_of`, with rubbish at padding: models compute something there too."""
    out = np.full(part.rows.mask.shape, padding, np.float32)
    for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
        call = part.rows.calls[part.rows.call[r, k]]
        out[r, k] = scale * value_of(call.call_id, int(part.rows.offset[r, k]))
    return out


def by_call(minibatch: Minibatch, name: str) -> dict[str, np.ndarray]:
    out: dict[str, dict[int, float]] = {}
    for part in minibatch:
        assert np.isfinite(getattr(part.arrays, name)).all()
        for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
            own = out.setdefault(part.rows.calls[part.rows.call[r, k]].call_id, {})
            own[int(part.rows.offset[r, k])] = float(getattr(part.arrays, name)[r, k])
    return {c: np.array([own[i] for i in range(len(own))]) for c, own in out.items()}


def minibatch_of(episodes: list[Episode], config: BatchConfig = CONFIG) -> Minibatch:
    (batch,), _ = build_batch(episodes, config)
    return batch


@given(SEEDS, st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)]))
@settings(deadline=None)
def test_advantages_are_those_of_each_rollouts_tree(
    seed: int, discounts: tuple[float, float]
) -> None:
    """Also where a rollout is cut over rows, against `tree_gae` on the calls themselves."""
    gamma, lam = discounts
    config = dataclasses.replace(CONFIG, gamma=gamma, lam=lam)
    episodes = random_episodes(seed)
    batch = minibatch_of(episodes, config)
    filled, _ = set_values(batch, [column(p) for p in batch], config)
    got = {n: by_call(filled, n) for n in ("advantage", "returns", "old_values")}
    for e in episodes:
        values = [
            np.array([value_of(c.call_id, i) for i in range(c.completion_tok)], np.float32)
            for c in e.calls
        ]
        before, ends = turn_order(select_calls(e.calls, KEEP_ALL))
        assert e.reward is not None
        advantages, returns = tree_gae(values, before, ends, e.reward, gamma, lam)
        for call, v, a, r in zip(e.calls, values, advantages, returns, strict=True):
            np.testing.assert_allclose(got["advantage"][call.call_id], a, atol=1e-6)
            np.testing.assert_allclose(got["returns"][call.call_id], r, atol=1e-6)
            np.testing.assert_allclose(got["old_values"][call.call_id], v, atol=1e-6)


def advantages_of(calls: list[CallRecord], config: BatchConfig) -> dict[str, np.ndarray]:
    """With R = 1 and V of token i of call c = `value_of`."""
    batch = minibatch_of([episode("e", calls, 1.0)], config)
    filled, _ = set_values(batch, [column(p) for p in batch], config)
    return by_call(filled, "advantage")


def test_credit_flows_back_through_turns_that_are_presented_again() -> None:
    """A moving tail: no prompt starts with an earlier one. The chain is that of all its tokens."""
    config = dataclasses.replace(CONFIG, gamma=0.9, lam=0.8)
    calls = presented_again([(), (0,), (0, 1), (0, 1, 2)])
    got = advantages_of(calls, config)
    flat = np.array([value_of(c.call_id, i) for c in calls for i in range(c.completion_tok)])
    (chain,), _ = tree_gae([flat], [()], [1], 1.0, 0.9, 0.8)
    np.testing.assert_allclose(np.concatenate([got[c.call_id] for c in calls]), chain, atol=1e-6)
    alone = 1.0 - value_of("e.0", 0)  # what its only token had as a root
    assert abs(got["e.0"][0] - alone) > 0.1


def test_two_continuations_by_hand() -> None:
    """1 (then 2) and 3 go on from call 0, an end each: at 0 the mean of both, half and half.

    Behind call 0: gamma V' - V + gamma lambda A', of V' and A' of the first tokens of 1 and 3.
    """
    gamma, lam = 0.9, 0.8
    config = dataclasses.replace(CONFIG, gamma=gamma, lam=lam)
    got = advantages_of(presented_again([(), (0,), (0, 1), (0,)]), config)
    v = {n: value_of(f"e.{n}", 0) for n in (0, 1, 3)}
    mean_v, mean_a = (v[1] + v[3]) / 2, (got["e.1"][0] + got["e.3"][0]) / 2
    assert got["e.0"][0] == pytest.approx(gamma * mean_v - v[0] + gamma * lam * mean_a, abs=1e-6)
    last = value_of("e.3", 3)
    assert got["e.3"][3] == pytest.approx(1.0 - last, abs=1e-6)  # the reward, at both ends
    assert got["e.2"][2] == pytest.approx(1.0 - value_of("e.2", 2), abs=1e-6)
    ahead = gamma * value_of("e.2", 0) - value_of("e.1", 1) + gamma * lam * got["e.2"][0]
    assert got["e.1"][1] == pytest.approx(ahead, abs=1e-6)  # no reward behind call 1


def test_the_order_of_slots_does_not_matter() -> None:
    config = dataclasses.replace(CONFIG, lam=0.9)
    batch = minibatch_of(random_episodes(12), config)
    backwards = []
    for part in batch:
        columns = ("target", "pred", "mask", "rollout", "call", "offset")
        rows = {name: getattr(part.rows, name)[:, ::-1] for name in columns}
        arrays = part.arrays.replace(mask=part.arrays.mask[:, ::-1])
        rows = dataclasses.replace(part.rows, **rows)
        backwards.append(dataclasses.replace(part, rows=rows, arrays=arrays))
    one, _ = set_values(batch, [column(p) for p in batch], config)
    other, _ = set_values(tuple(backwards), [column(p) for p in backwards], config)
    for name in ("advantage", "returns"):
        a, b = by_call(one, name), by_call(other, name)
        assert a.keys() == b.keys()
        for call_id, numbers in a.items():
            np.testing.assert_array_equal(numbers, b[call_id])


def test_a_rollout_does_lie_in_several_rows_above() -> None:
    batch = minibatch_of(random_episodes(12))
    rows_of: dict[int, set[tuple[int, int]]] = {}
    for p, part in enumerate(batch):
        for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
            rows_of.setdefault(int(part.rows.rollout[r, k]), set()).add((p, int(r)))
    assert max(len(rows) for rows in rows_of.values()) > 1


def test_padding_stays_nothing() -> None:
    batch = minibatch_of(random_episodes(3))
    filled, _ = set_values(batch, [column(p) for p in batch], CONFIG)
    filled, _ = set_old(filled, [column(p, 0.1) for p in filled], CONFIG)
    filled = set_ref(filled, [column(p, 0.2) for p in filled])
    zero = ("advantage", "returns", "old_values", "old_logprobs", "ref_logprobs", "weight")
    assert any((~part.arrays.mask).any() for part in filled)
    for part in filled:
        padding = ~part.arrays.mask
        assert not any(getattr(part.arrays, name)[padding].any() for name in zero)
        assert (part.arrays.correction[padding] == 1).all()


@given(SEEDS)
@settings(deadline=None)
def test_whitened_advantages(seed: int) -> None:
    """Mean 0 and deviation 1 over trained tokens; returns and order are as they were."""
    config = dataclasses.replace(CONFIG, whiten_advantages=True, lam=0.9)
    batch = minibatch_of(random_episodes(seed))
    values = [column(p) for p in batch]
    plain, _ = set_values(batch, values, dataclasses.replace(config, whiten_advantages=False))
    white, metrics = set_values(batch, values, config)
    a, b = (np.concatenate([p.arrays.advantage[p.arrays.mask] for p in m]) for m in (plain, white))
    np.testing.assert_allclose(b, (a - a.mean()) / (a.std() + 1e-8), atol=1e-4)
    if a.std() > 1e-3:
        assert abs(metrics["advantage_mean"]) < 1e-4
        assert abs(metrics["advantage_std"] - 1.0) < 1e-4
    for one, other in zip(plain, white, strict=True):
        np.testing.assert_array_equal(one.arrays.returns, other.arrays.returns)


def test_auxiliary_calls_weigh_less_after_whitening() -> None:
    calls = [
        make_call(0, [1, 2], [3, 4], episode="a"),
        make_call(1, [5], [6], episode="a", role=Role.SUBAGENT, chain="sub"),
    ]
    episodes = [episode("a", calls, 1.0), simple("b", 0.0, 2)]
    for whiten in (False, True):
        config = dataclasses.replace(CONFIG, whiten_advantages=whiten)
        batch = minibatch_of(episodes)
        values = [np.zeros(p.rows.mask.shape) for p in batch]
        full, _ = set_values(batch, values, config)
        half, _ = set_values(batch, values, dataclasses.replace(config, auxiliary_weight=0.5))
        a, b = by_call(full, "advantage"), by_call(half, "advantage")
        np.testing.assert_array_equal(a["a.0"], b["a.0"])
        np.testing.assert_allclose(0.5 * a["a.1"], b["a.1"])


def test_the_numbers_of_the_values() -> None:
    episodes = [episode("a", forked_calls("a"), 1.0), simple("b", 0.0, 2)]
    batch = minibatch_of(episodes)
    _, metrics = set_values(batch, [np.full(p.rows.mask.shape, 0.25) for p in batch], CONFIG)
    tokens = 8 + 2  # of a and b
    np.testing.assert_allclose(metrics["value_mean"], 0.25)
    np.testing.assert_allclose(metrics["return_mean"], 8 / tokens)
    np.testing.assert_allclose(metrics["advantage_mean"], 8 / tokens - 0.25, rtol=1e-6)
    assert metrics["old_explained_variance"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["off", "token", "sequence", "sequence_mask", "icepop"])
def test_the_correction_is_per_call_whatever_the_rows(kind: str) -> None:
    """Long rows against rows that cut the rollouts: the same weight at every (call, offset)."""
    config = dataclasses.replace(CONFIG, correction=CorrectionConfig(kind, cap=1.2, low=0.9))
    wide = dataclasses.replace(config, pack=PackConfig(row_tok=512, train_tok=256))
    found, numbers = [], []
    for how in (config, wide):
        batch = minibatch_of(random_episodes(12), how)
        old = [p.arrays.rollout_logprobs + column(p, 0.3) for p in batch]
        filled, metrics = set_old(batch, old, how)
        found.append(by_call(filled, "correction"))
        numbers.append(metrics)
    assert found[0].keys() == found[1].keys()
    for call_id, weight in found[0].items():
        np.testing.assert_allclose(weight, found[1][call_id], rtol=1e-6)
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_the_drift_is_of_all_parts_together() -> None:
    batch = minibatch_of(random_episodes(12))
    old = [p.arrays.rollout_logprobs + column(p, 0.3) for p in batch]
    _, metrics = set_old(batch, old, CONFIG)
    pairs = [
        (o[p.rows.mask], p.arrays.rollout_logprobs[p.rows.mask])
        for o, p in zip(old, batch, strict=True)
    ]
    a, b = (np.concatenate(x) for x in zip(*pairs, strict=True))
    expected = drift(a, b, np.zeros(len(a), np.int64), CONFIG.correction)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_wrong_shapes_and_missing_parts_are_refused() -> None:
    batch = minibatch_of(random_episodes(12))
    with pytest.raises(ValueError, match="an array per part"):
        set_old(batch, [], CONFIG)
    with pytest.raises(ValueError, match="an array per part"):
        set_values(batch, [np.zeros(3)] * len(batch), CONFIG)
    lost = tuple(
        dataclasses.replace(
            p,
            rows=dataclasses.replace(
                p.rows,
                **{n: getattr(p.rows, n)[:, :0] for n in ("mask", "call", "offset")},
                calls=(),
            ),
        )
        for p in batch
    )
    with pytest.raises(LedgerError, match="all parts"):
        set_values(lost, [np.zeros(p.rows.mask.shape) for p in lost], CONFIG)
    alien = tuple(dataclasses.replace(p, rollouts=()) for p in batch)
    with pytest.raises(LedgerError, match="of no rollout"):
        set_values(alien, [column(p) for p in alien], CONFIG)

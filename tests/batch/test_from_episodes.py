"""From graded episodes to minibatches: weights, groups, and a ledger that catches every slip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.batch.from_episodes import (
    PATH_SUM,
    PPO,
    ROLLOUT_MEAN,
    TOKEN_MEAN,
    BatchConfig,
    build_batch,
    build_sft_batch,
)
from clawgym_jax.batch.ledger import check_ledger
from clawgym_jax.batch.scored import set_old
from clawgym_jax.batch.tree_batch import Minibatch, Part, TreeBatch
from clawgym_jax.core.errors import ConfigError, LedgerError, LogprobError
from clawgym_jax.core.types import Outcome, Role
from clawgym_jax.losses.advantage import GroupConfig
from clawgym_jax.losses.correction import CorrectionConfig
from clawgym_jax.losses.policy import clipped_surrogate
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig, PackedRows, pack
from tests.batch.episodes import (
    episode,
    forked_calls,
    presented_again,
    random_episodes,
    simple,
)
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
CONFIG = BatchConfig(pack=PackConfig(row_tok=256, train_tok=128))
SMALL = BatchConfig(pack=PackConfig(row_tok=96, train_tok=64, shorter=(48,)), filters=KEEP_ALL)
PLAIN = dataclasses.replace(CONFIG, group=GroupConfig(scale_by_std=False), filters=KEEP_ALL)


def real(minibatch: Minibatch, column: str) -> np.ndarray:
    """A column of all parts at trainable tokens."""
    return np.concatenate([getattr(p.arrays, column)[p.arrays.mask] for p in minibatch])


def per_call(minibatch: Minibatch, column: str) -> dict[str, list[float]]:
    """call id -> the column of its tokens, in order, read slot by slot."""
    out: dict[str, dict[int, float]] = {}
    for part in minibatch:
        values = getattr(part.arrays, column)
        for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
            own = out.setdefault(part.rows.calls[part.rows.call[r, k]].call_id, {})
            own[int(part.rows.offset[r, k])] = float(values[r, k])
    return {c: [own[i] for i in range(len(own))] for c, own in out.items()}


def test_each_rollout_weighs_the_same_and_each_token_of_it() -> None:
    batches, report = build_batch([simple("a", 1.0, 4), simple("b", 0.0, 2)], CONFIG)
    batch = batches[0]
    np.testing.assert_allclose(
        sorted(real(batch, "weight").tolist()), [1 / 8] * 4 + [1 / 4] * 2, rtol=1e-6
    )
    assert set(real(batch, "advantage").round(3).tolist()) == {1.0, -1.0}
    assert report.rollouts == {"in the loss": 2}
    assert not any(p.arrays.weight[~p.arrays.mask].any() for p in batch)


def test_token_mean() -> None:
    config = dataclasses.replace(CONFIG, weighting=TOKEN_MEAN)
    batches, _ = build_batch([simple("a", 1.0, 4), simple("b", 0.0, 2)], config)
    np.testing.assert_allclose(real(batches[0], "weight"), 1 / 6, rtol=1e-6)


def test_path_sum_counts_the_leaves_below() -> None:
    """Three leaves behind one call: its tokens weigh 3 / |B|, those of the leaves 1 / |B|."""
    config = dataclasses.replace(PLAIN, weighting=PATH_SUM)
    batches, _ = build_batch([episode("a", forked_calls("a"), 1.0), simple("b", 0.0, 2)], config)
    weights = per_call(batches[0], "weight")
    assert weights["a.0"] == [1.5, 1.5]
    assert weights["a.3"] == [0.5, 0.5, 0.5]
    assert weights["b.0"] == [0.5, 0.5]


@pytest.mark.parametrize("algorithm", ["grpo", PPO])
def test_turns_that_are_presented_again_are_paths_of_their_own(algorithm: str) -> None:
    """What a loss computes is a path of tokens: continuing is no edge there, for any weights."""
    calls = presented_again([(), (0,), (0, 1), (0,)], "a")
    pair = [episode("a", calls, 1.0), simple("b", 0.0, 2)]
    for weighting, expected in ((PATH_SUM, 1 / 2), (ROLLOUT_MEAN, 1 / (2 * 10))):
        config = dataclasses.replace(PLAIN, weighting=weighting, algorithm=algorithm)
        weights = per_call(build_batch(pair, config)[0][0], "weight")
        for call in calls:
            np.testing.assert_allclose(weights[call.call_id], expected, rtol=1e-6)


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_path_sum_is_training_every_path_alone(seed: int) -> None:
    """W of a token = how many root-to-leaf paths of calls run through its call, over |B|."""
    config = dataclasses.replace(SMALL, weighting=PATH_SUM, algorithm=PPO)
    episodes = random_episodes(seed)
    batches, _ = build_batch(episodes, config)
    weights = per_call(batches[0], "weight")
    for e in episodes:
        tree = select_calls(e.calls, KEEP_ALL).tree
        inner = {i for through in tree.extends for i in through}
        for i, call in enumerate(tree.calls):
            paths = [j for j in range(len(tree.calls)) if j not in inner]
            through = sum(j == i or i in tree.extends[j] for j in paths)
            np.testing.assert_allclose(weights[call.call_id], through / len(episodes), rtol=1e-6)


def test_a_forked_rollout_counts_once_in_the_baseline() -> None:
    """Known fault A8: rewards 1, 1, 1, 0, the first three being branches of one rollout."""
    batches, _ = build_batch([episode("a", forked_calls("a"), 1.0), simple("b", 0.0, 2)], PLAIN)
    advantages = per_call(batches[0], "advantage")
    assert {c: set(a) for c, a in advantages.items()} == {
        **{f"a.{i}": {0.5} for i in range(4)},
        "b.0": {-0.5},
    }
    weights = per_call(batches[0], "weight")
    np.testing.assert_allclose(sum(sum(w) for c, w in weights.items() if c[0] == "a"), 0.5)


def test_minibatches_hold_whole_groups_and_weigh_by_their_own_size() -> None:
    episodes = [simple(f"{g}{i}", float(i), 3, group=g) for g in "abcd" for i in range(2)]
    batches, report = build_batch(episodes, CONFIG, minibatches=2, seed=1)
    assert len(batches) == 2
    for batch in batches:
        np.testing.assert_allclose(real(batch, "weight").sum(), 1.0, rtol=1e-6)
        assert abs(float((real(batch, "weight") * real(batch, "advantage")).sum())) < 1e-6
        assert len(batch[0].rollouts) == 4
    assert report.ledger.trained_tok == 24


def test_infrastructure_failures_leave_a_reason_in_the_ledger() -> None:
    """Known fault A9: neither a sandbox that failed nor a grader that did is a reward of 0."""
    failed = simple("c", 1.0, 5, outcome=Outcome.INFRASTRUCTURE)
    ungraded = simple("d", None, 7)
    _, report = build_batch([simple("a", 1.0, 4), simple("b", 0.0, 2), failed, ungraded], CONFIG)
    assert report.ledger.dropped_tok == {"no reward": 12}
    assert report.ledger.sampled_tok == 18
    assert report.rollouts == {"in the loss": 2, "no reward": 2}


def test_over_branching_rollouts_are_discarded_from_the_baseline_too() -> None:
    wild = episode("w", [make_call(i, [1, 2], [i], episode="w") for i in range(5)], 0.0)
    config = dataclasses.replace(CONFIG, filters=FilterConfig(max_leaves=3, dead_leaves=False))
    batches, report = build_batch([simple("a", 1.0, 2), simple("b", 1.0, 2), wild], config)
    assert not real(batches[0], "advantage").any()
    assert report.rollouts["over-branching"] == report.groups["over-branching"] == 1
    assert report.ledger.dropped_tok == {"over-branching": 5}


def test_groups_without_variance_can_leave_the_loss_and_its_size() -> None:
    config = dataclasses.replace(PLAIN, group=GroupConfig(drop_uniform=True))
    same = [simple(n, 1.0, 4, group="same") for n in "ab"]
    batches, report = build_batch([*same, simple("c", 1.0, 2), simple("d", 0.0, 2)], config)
    assert report.rollouts == {"in the loss": 2, "zero-variance group": 2}
    assert report.ledger.dropped_tok == {"zero-variance group": 8}
    np.testing.assert_allclose(real(batches[0], "weight"), 1 / 4, rtol=1e-6)


def test_sub_agents_are_dropped_by_name_or_weighed() -> None:
    calls = [
        make_call(0, [1, 2], [3, 4], episode="a"),
        make_call(1, [5], [6, 7, 8], episode="a", role=Role.SUBAGENT, chain="sub"),
    ]
    episodes = [episode("a", calls, 1.0), simple("b", 0.0, 2)]
    _, report = build_batch(episodes, CONFIG)
    assert report.ledger.dropped_tok == {"auxiliary call: sub-agent": 3}
    batches, _ = build_batch(episodes, dataclasses.replace(PLAIN, auxiliary_weight=0.5))
    advantages = per_call(batches[0], "advantage")
    assert advantages["a.0"] == [0.5, 0.5]
    assert advantages["a.1"] == [0.25, 0.25, 0.25]


def test_ppo_needs_no_groups() -> None:
    config = dataclasses.replace(CONFIG, algorithm=PPO)
    alone, empty = simple("a", 1.0, 4, group="alone"), episode("e", [], 1.0)
    batches, report = build_batch(
        [alone, simple("b", 0.25, 2), simple("c", None, 2), empty], config
    )
    assert report.rollouts == {"in the loss": 2, "no reward": 1, "no trainable token": 1}
    assert [r.reward for r in batches[0][0].rollouts] == [
        {"a.0": 1.0, "b.0": 0.25}[r.call_ids[0]] for r in batches[0][0].rollouts
    ]
    assert not real(batches[0], "advantage").any()  # until values are set
    split, _ = build_batch([simple(n, 1.0, 2, group="one") for n in "abcd"], config, 2, seed=3)
    assert [len(batch[0].rollouts) for batch in split] == [2, 2]


@given(st.integers(0, 10**6), st.sampled_from(["rollout_mean", TOKEN_MEAN, PATH_SUM]))
@settings(deadline=None)
def test_balance_adds_up_the_weights_of_what_a_token_predicts(seed: int, weighting: str) -> None:
    config = dataclasses.replace(SMALL, weighting=weighting, algorithm=PPO)
    batches, _ = build_batch(random_episodes(seed), config)
    for part in batches[0]:
        expected = np.zeros(part.arrays.tokens.shape)
        for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
            expected[r, part.rows.pred[r, k]] += part.arrays.weight[r, k]
        np.testing.assert_allclose(part.arrays.balance, expected, rtol=1e-6)
        np.testing.assert_allclose(expected.sum(), part.arrays.weight.sum(), rtol=1e-5)


@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs", "versions"])
def test_misaligned_logprobs_are_an_error(field: str) -> None:
    """Known fault A14: n - 1 of n, or none."""
    good = make_call(0, [1, 2], [3, 4, 5], episode="a")
    for keep in (2, 0):
        short = dataclasses.replace(
            good.completion, **{field: getattr(good.completion, field)[:keep]}
        )
        bad = dataclasses.replace(good, completion=short)
        with pytest.raises(LogprobError, match=f"3 sampled tokens but {keep} {field}"):
            build_batch([episode("a", [bad], 1.0), simple("b", 0.0, 2)], CONFIG)


def test_greedy_samples_are_refused() -> None:
    call = make_call(0, [1, 2], [3], episode="a", temperature=0.0)
    with pytest.raises(LogprobError, match="greedily"):
        build_batch([episode("a", [call], 1.0), simple("b", 0.0, 2)], CONFIG)


def test_supervised_rows_take_good_episodes_only() -> None:
    episodes = [simple("a", 1.0, 4), simple("b", 0.2, 2), simple("c", None, 2)]
    batch, report = build_sft_batch(episodes, CONFIG, min_reward=0.5)
    assert sum(p.arrays.mask.sum() for p in batch) == 4
    assert (real(batch, "advantage") == 1).all()
    assert report.ledger.dropped_tok == {
        "reward below the cold start's threshold": 2,
        "no reward": 2,
    }


def packed(seed: int) -> tuple[list, list[PackedRows]]:
    selections = [select_calls(random_rollout(seed), KEEP_ALL)]
    return selections, list(pack(selections, CONFIG.pack))


def test_the_ledger_sees_a_lost_a_doubled_and_a_changed_token() -> None:
    selections, parts = packed(3)
    check_ledger(selections, [""], *parts)
    rows, others = parts[0], parts[1:]
    r, k = (int(i[0]) for i in np.nonzero(rows.mask))
    lost, doubled, changed = rows.mask.copy(), rows.offset.copy(), rows.tokens.copy()
    lost[r, k] = False
    doubled[r, k] += 1
    changed[r, rows.target[r, k]] += 1
    for broken in ({"mask": lost}, {"offset": doubled}, {"tokens": changed}):
        with pytest.raises(LedgerError):
            check_ledger(selections, [""], dataclasses.replace(rows, **broken), *others)
    with pytest.raises(LedgerError):
        check_ledger(selections, ["dropped all the same"], *parts)


def test_the_packing_ledger_counts_the_tokens_in_the_arrays() -> None:
    selections, (rows, *others) = packed(3)
    first = rows.first.copy()
    first[np.nonzero(first >= 0)[0][0], 0] = -1
    wrong = ({"first": first}, {"unique_tok": rows.unique_tok + 1}, {"repeated_tok": -1})
    for broken in wrong:
        with pytest.raises(LedgerError, match="do not add up"):
            check_ledger(selections, [""], dataclasses.replace(rows, **broken), *others)


def test_the_ledger_is_closed_over_all_parts_together() -> None:
    """Two parts that are right by themselves are wrong together, and the other way round."""
    selections, parts = packed(3)
    with pytest.raises(LedgerError, match="each to be trained once"):
        check_ledger(selections, [""], *parts, *parts)
    both = [*selections, select_calls(random_rollout(4, "f"), KEEP_ALL)]
    others = pack(both[1:], CONFIG.pack)
    with pytest.raises(LedgerError, match="missing from the batch"):
        check_ledger(both, ["", ""], *parts)
    ledger = check_ledger(both, ["", ""], *parts, *others)
    assert ledger.trained_tok == sum(int(p.mask.sum()) for p in [*parts, *others])


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["grpo", PPO]))
@settings(deadline=None)
def test_every_sampled_token_is_accounted_for(seed: int, minibatches: int, algorithm: str) -> None:
    episodes = random_episodes(seed, 5)
    config = dataclasses.replace(SMALL, algorithm=algorithm, filters=FilterConfig(max_leaves=3))
    batches, report = build_batch(episodes, config, minibatches, seed)
    sampled = sum(call.completion_tok for e in episodes for call in e.calls)
    trained = sum(int(p.arrays.mask.sum()) for batch in batches for p in batch)
    assert sampled == trained + sum(report.ledger.dropped_tok.values())
    slots = sum(p.arrays.tokens.size for batch in batches for p in batch)
    assert slots == report.unique_tok + report.repeated_tok + report.padding_tok


def test_an_empty_step_gives_an_empty_batch() -> None:
    for algorithm in ("grpo", PPO):
        config = dataclasses.replace(CONFIG, algorithm=algorithm)
        batches, report = build_batch([simple("a", None, 4)], config)
        assert sum(int(p.arrays.mask.sum()) for batch in batches for p in batch) == 0
        assert report.ledger.trained_tok == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="rollout_mean"):
        BatchConfig(weighting="mean")
    with pytest.raises(ConfigError, match="ppo"):
        BatchConfig(algorithm="reinforce")
    with pytest.raises(ConfigError, match="gamma"):
        BatchConfig(gamma=1.5)


TRL = json.loads(
    (Path(__file__).parent.parent / "data" / "oracles" / "trl.json").read_text(encoding="utf-8")
)


def trl_episodes() -> list:
    """TRL's linear rollouts as episodes of one call each."""
    out = []
    for i, (n, reward) in enumerate(zip(TRL["lengths"], TRL["rewards"], strict=True)):
        call = make_call(0, [4], [5] * n, episode=f"e{i}")
        logprobs = np.array(TRL["logprobs"]["rollout"][i][:n], np.float32)
        done = dataclasses.replace(call.completion, logprobs=logprobs)
        call = dataclasses.replace(call, completion=done)
        out.append(episode(f"e{i}", [call], reward, group="ab"[i // 3]))
    return out


def test_linear_rollouts_give_trls_loss() -> None:
    """The whole way from episodes to the loss, 1e-6. TRL counts the ungraded rollout in |B|."""
    config = dataclasses.replace(PLAIN, correction=CorrectionConfig(cap=TRL["cap"]))
    case = TRL["cases"]["grpo_no_scale"]
    (batch,), _ = build_batch(trl_episodes(), config)
    logprobs = {n: [_at(part, TRL["logprobs"][n]) for part in batch] for n in ("old", "new")}
    batch, _ = set_old(batch, logprobs["old"], config)

    def loss(new: list[jax.Array]) -> jax.Array:
        return sum(  # type: ignore[return-value]
            (_grpo(part.arrays, x) for part, x in zip(batch, new, strict=True)), jnp.float32(0)
        )

    value, gradient = jax.value_and_grad(loss)([jnp.asarray(x) for x in logprobs["new"]])
    np.testing.assert_allclose(value * 5 / 6, case["loss"], rtol=1e-6, atol=1e-6)
    for part, own in zip(batch, gradient, strict=True):
        expected = _at(part, case["gradient"])
        np.testing.assert_allclose(own * 5 / 6, expected, rtol=1e-5, atol=1e-6)


def _at(part: Part, table: list[list[float]]) -> np.ndarray:
    """TRL's [rollout, offset] at our slots, f32[R, K]."""
    out = np.zeros(part.rows.mask.shape, np.float32)
    for r, k in zip(*np.nonzero(part.rows.mask), strict=True):
        number = int(part.rows.calls[part.rows.call[r, k]].episode_id[1:])
        out[r, k] = table[number][part.rows.offset[r, k]]
    return out


def _grpo(batch: TreeBatch, new: jax.Array) -> jax.Array:
    out = clipped_surrogate(
        new, batch.old_logprobs, batch.advantage,
        clip_low=TRL["clip_low"], clip_high=TRL["clip_high"],
    )  # fmt: skip
    return -jnp.sum(batch.weight * batch.correction * out.objective)

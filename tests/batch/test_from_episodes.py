"""From graded episodes to a batch: weights, groups, and a ledger that catches every slip."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from clawgym_jax.batch.from_episodes import (
    TOKEN_MEAN,
    BatchConfig,
    build_batch,
    build_sft_batch,
)
from clawgym_jax.batch.ledger import check_ledger
from clawgym_jax.core.errors import LedgerError, LogprobError
from clawgym_jax.core.types import CallRecord, Episode, EpisodeRecord, Grade, Outcome, Role
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig, pack
from tests.tree.histories import make_call, random_rollout

CONFIG = BatchConfig(pack=PackConfig(row_tok=256, train_tok=128))


def episode(
    name: str, calls: list[CallRecord], score: float | None, group: str = "g", **changes: object
) -> Episode:
    record = EpisodeRecord(
        run_id="r", episode_id=name, group_id=group, task_id="t", harness="h", split="train",
        step=0, seed=0, outcome=Outcome.OK, detail="", grade=Grade(score),
        call_ids=tuple(c.call_id for c in calls), timings_s={},
    )  # fmt: skip
    return Episode(dataclasses.replace(record, **changes), tuple(calls))  # type: ignore[arg-type]


def simple(name: str, score: float | None, tokens: int, group: str = "g", **changes: object):
    ids = list(range(10, 10 + tokens))
    return episode(name, [make_call(0, [1, 2, 3], ids, episode=name)], score, group, **changes)


def test_each_rollout_weighs_the_same_and_each_token_of_it() -> None:
    batches, report = build_batch([simple("a", 1.0, 4), simple("b", 0.0, 2)], CONFIG)
    batch = batches[0]
    weights = sorted(batch.weight[batch.mask].tolist())
    np.testing.assert_allclose(weights, [1 / 8] * 4 + [1 / 4] * 2, rtol=1e-6)
    assert set(batch.advantage[batch.mask].round(3).tolist()) == {1.0, -1.0}
    assert report.rollouts == {"in the loss": 2}
    assert not batch.weight[~batch.mask].any()


def test_token_mean() -> None:
    config = dataclasses.replace(CONFIG, weighting=TOKEN_MEAN)
    batches, _ = build_batch([simple("a", 1.0, 4), simple("b", 0.0, 2)], config)
    np.testing.assert_allclose(batches[0].weight[batches[0].mask], 1 / 6, rtol=1e-6)


def test_minibatches_hold_whole_groups_and_weigh_by_their_own_size() -> None:
    episodes = [simple(f"{g}{i}", float(i), 3, group=g) for g in "abcd" for i in range(2)]
    batches, report = build_batch(episodes, CONFIG, minibatches=2, seed=1)
    assert len(batches) == 2
    for batch in batches:
        np.testing.assert_allclose(batch.weight[batch.mask].sum(), 1.0, rtol=1e-6)
        assert abs(float((batch.weight * batch.advantage).sum())) < 1e-6
    assert report.ledger.trained_tok == 24


def test_infrastructure_failures_leave_a_reason_in_the_ledger() -> None:
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
    assert not batches[0].advantage.any()
    assert report.rollouts["over-branching"] == 1
    assert report.ledger.dropped_tok == {"over-branching": 5}


def test_sub_agents_are_dropped_by_name() -> None:
    calls = [
        make_call(0, [1, 2], [3, 4], episode="a"),
        make_call(1, [5], [6, 7, 8], episode="a", role=Role.SUBAGENT, chain="sub"),
    ]
    _, report = build_batch([episode("a", calls, 1.0), simple("b", 0.0, 2)], CONFIG)
    assert report.ledger.dropped_tok == {"auxiliary call: sub-agent": 3}


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
    assert batch.mask.sum() == 4
    assert (batch.advantage[batch.mask] == 1).all()
    assert report.ledger.dropped_tok == {
        "reward below the cold start's threshold": 2,
        "no reward": 2,
    }


def test_the_ledger_sees_a_lost_a_doubled_and_a_changed_token() -> None:
    selections = [select_calls(random_rollout(3), FilterConfig(False, 0, False))]
    rows = pack(selections, CONFIG.pack)
    check_ledger(selections, [""], rows)
    r, k = (int(i[0]) for i in np.nonzero(rows.mask))
    lost, doubled, changed = rows.mask.copy(), rows.offset.copy(), rows.tokens.copy()
    lost[r, k] = False
    doubled[r, k] += 1
    changed[r, rows.target[r, k]] += 1
    for broken in ({"mask": lost}, {"offset": doubled}, {"tokens": changed}):
        with pytest.raises(LedgerError):
            check_ledger(selections, [""], dataclasses.replace(rows, **broken))
    with pytest.raises(LedgerError):
        check_ledger(selections, ["dropped all the same"], rows)


def test_an_empty_step_gives_an_empty_batch() -> None:
    batches, report = build_batch([simple("a", None, 4)], CONFIG)
    assert sum(int(b.mask.sum()) for b in batches) == 0
    assert report.ledger.trained_tok == 0

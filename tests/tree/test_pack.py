"""Packed rows are the forest of their calls, whatever was cut, shared and put in which bucket."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.batch.ledger import check_ledger
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from clawgym_jax.tree.pack import PackConfig, PackedRows, pack
from tests.tree.counting import Comparisons
from tests.tree.histories import make_call, random_rollout
from tests.tree.naive import Label, labels_of, prefixes

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
CONFIGS = st.builds(
    PackConfig,
    row_tok=st.sampled_from([66, 90, 200]),
    train_tok=st.sampled_from([9, 64]),
    shorter=st.sampled_from([(), (40,), (64, 13, 30)]),
    share_context=st.booleans(),
    share_versions=st.booleans(),
)


def versioned(calls: list[CallRecord], rng: random.Random) -> list[CallRecord]:
    """Weights that change between the calls of a rollout, and now and then within one."""
    out = []
    for call in calls:
        versions = np.full(call.completion_tok, rng.randint(1, 2), np.uint32)
        if rng.random() < 0.2:
            versions[-1] += 1
        done = dataclasses.replace(call.completion, versions=versions)
        out.append(dataclasses.replace(call, completion=done))
    return out


def random_selections(seed: int, filters: FilterConfig) -> list[Selection]:
    rng = random.Random(seed)
    made = []
    for i in range(rng.randint(1, 5)):
        root = rng.choice([(1, 2, 3), (1, 2, 4, 5)])
        rollout = random_rollout(seed + i, f"e{i}", root, vocab=rng.choice([2, 5]))
        made.append(select_calls(versioned(rollout, rng), filters))
    return made


class Expected:
    """What rows must hold, from label lists alone."""

    def __init__(self, selections: Sequence[Selection], config: PackConfig) -> None:
        self.labels: dict[str, list[Label]] = {}
        self.sharers: dict[str, object] = {}
        self.kept: set[str] = set()
        for rollout, selection in enumerate(selections):
            calls = selection.tree.calls
            self.kept |= {calls[i].call_id for i in selection.kept}
            for call, labels in zip(calls, labels_of(calls), strict=True):
                self.labels[call.call_id] = labels
                versions: object = frozenset(call.completion.versions.tolist())
                if len(set(call.completion.versions.tolist())) > 1:
                    versions = call.call_id
                self.sharers[call.call_id] = (
                    None if config.share_context else rollout,
                    None if config.share_versions else versions,
                )

    def tokens(self, calls: Sequence[str]) -> set[tuple[object, tuple[Label, ...]]]:
        """The different tokens of some calls: prefixes, apart for those that may not share."""
        return {
            (self.sharers[call], prefix)
            for call in calls
            for prefix in prefixes([self.labels[call]])
        }


def full(call: CallRecord) -> np.ndarray:
    return np.concatenate([call.prompt_ids, call.completion.ids])


def calls_of_row(rows: PackedRows, r: int) -> list[CallRecord]:
    return [rows.calls[c] for c in sorted(set(rows.call[r][rows.mask[r]].tolist()))]


@given(st.integers(0, 10**6), CONFIGS, st.sampled_from([KEEP_ALL, FilterConfig()]))
def test_every_kept_token_is_trained_once_behind_its_own_path(
    seed: int, config: PackConfig, filters: FilterConfig
) -> None:
    selections = random_selections(seed, filters)
    trained: Counter[tuple[str, int]] = Counter()
    for rows in pack(selections, config):
        for r, k in zip(*np.nonzero(rows.mask), strict=True):
            call, offset = rows.calls[rows.call[r, k]], int(rows.offset[r, k])
            assert any(call is c for c in selections[rows.rollout[r, k]].tree.calls)
            trained[call.call_id, offset] += 1
            i = int(rows.target[r, k])
            path = np.flatnonzero((np.arange(len(rows.end[r])) <= i) & (i < rows.end[r]))
            stop = call.prompt_tok + offset + 1
            np.testing.assert_array_equal(rows.tokens[r][path], full(call)[:stop])
            np.testing.assert_array_equal(rows.position[r][path], np.arange(stop))
            assert rows.pred[r, k] == path[-2]
        padding = ~rows.mask
        assert (rows.pred[padding] == -1).all() and (rows.call[padding] == -1).all()
        assert (rows.rollout[padding] == -1).all()
    expected = [
        (selection.tree.calls[i].call_id, offset)
        for selection in selections
        for i in selection.kept
        for offset in range(selection.tree.calls[i].completion_tok)
    ]
    assert trained == Counter(expected)


@given(st.integers(0, 10**6), CONFIGS, st.sampled_from([KEEP_ALL, FilterConfig()]))
def test_rows_hold_what_the_naive_twin_holds(
    seed: int, config: PackConfig, filters: FilterConfig
) -> None:
    selections = random_selections(seed, filters)
    expected = Expected(selections, config)
    for rows in pack(selections, config):
        for r in range(len(rows.tokens)):
            calls = calls_of_row(rows, r)
            brought: dict[object, str] = {}  # token -> the first call of the row that has it
            for call in calls:  # in the order of `rows.calls`: rollout, then sampling
                for token in expected.tokens([call.call_id]):
                    brought.setdefault(token, call.call_id)
            found = set()
            for j in np.flatnonzero(rows.first[r] >= 0):
                first, depth = rows.calls[rows.first[r, j]], int(rows.position[r, j])
                prefix = tuple(expected.labels[first.call_id][: depth + 1])
                token = expected.sharers[first.call_id], prefix
                assert brought[token] == first.call_id
                path = (np.arange(len(rows.end[r])) <= j) & (j < rows.end[r])
                assert rows.tokens[r][path].tolist() == [t for t, _ in prefix]
                found.add(token)
            assert len(found) == np.count_nonzero(rows.first[r] >= 0)
            assert found == brought.keys()
            padding = np.flatnonzero(rows.first[r] < 0)
            np.testing.assert_array_equal(rows.end[r][padding], padding + 1)
            assert (rows.end[r] <= rows.end[r].size).all()
            used = len(found)
            assert not (rows.end[r][:used] > used).any(), "a token sees into the padding"


@given(st.integers(0, 10**6), CONFIGS, st.sampled_from([KEEP_ALL, FilterConfig()]))
def test_the_ledgers_close_over_all_buckets(
    seed: int, config: PackConfig, filters: FilterConfig
) -> None:
    selections = random_selections(seed, filters)
    expected = Expected(selections, config)
    parts = pack(selections, config)
    assert sum(p.unique_tok for p in parts) == len(expected.tokens(sorted(expected.kept)))
    assert all(p.unique_tok >= 0 and p.repeated_tok >= 0 and p.padding_tok >= 0 for p in parts)
    slots = sum(p.tokens.size for p in parts)
    assert slots == sum(p.unique_tok + p.repeated_tok + p.padding_tok for p in parts)
    assert sum(p.linear_tok for p in parts) == sum(len(expected.labels[c]) for c in expected.kept)
    assert {c.call_id for p in parts for c in p.calls} == expected.kept
    check_ledger(selections, [""] * len(selections), *parts)


@given(st.integers(0, 10**6), CONFIGS)
def test_each_row_is_in_the_smallest_bucket_that_holds_it(seed: int, config: PackConfig) -> None:
    parts = pack(random_selections(seed, KEEP_ALL), config)
    shapes = [(p.tokens.shape[1], p.target.shape[1]) for p in parts]
    assert shapes == sorted(set(shapes)) and set(shapes) <= set(config.buckets)
    for rows, shape in zip(parts, shapes, strict=True):
        smaller = [b for b in config.buckets if b < shape]
        for r in range(len(rows.tokens)):
            used, trained = np.count_nonzero(rows.first[r] >= 0), np.count_nonzero(rows.mask[r])
            assert used and trained
            assert not any(used <= n and trained <= k for n, k in smaller)


def test_buckets_have_slots_in_proportion() -> None:
    assert PackConfig(row_tok=64, train_tok=16).buckets == ((64, 16),)
    config = PackConfig(row_tok=64, train_tok=16, shorter=(32, 2))
    assert config.buckets == ((2, 1), (32, 8), (64, 16))


def test_a_small_rollout_takes_a_short_row_and_a_large_one_a_long_row() -> None:
    small = select_calls([make_call(0, [1, 2], [3], episode="a")], KEEP_ALL)
    large = select_calls([make_call(0, [5] * 62, [3], episode="b")], KEEP_ALL)
    config = PackConfig(row_tok=64, train_tok=16, shorter=(32, 8), share_context=False)
    short, long = pack([large, small], PackConfig(64, 16, (32, 8)))
    assert (short.tokens.shape, long.tokens.shape) == ((1, 8), (1, 64))
    assert short.rollout[short.mask].tolist() == [1] and long.rollout[long.mask].tolist() == [0]
    assert (short.unique_tok, short.repeated_tok, short.padding_tok) == (3, 0, 5)
    assert len(pack([small], config)) == 1


@pytest.mark.parametrize("selections", [[], [select_calls([], KEEP_ALL)]])
def test_nothing_to_pack_is_one_empty_part_of_the_largest_bucket(
    selections: list[Selection],
) -> None:
    (rows,) = pack(selections, PackConfig(row_tok=64, train_tok=16, shorter=(32,)))
    assert rows.tokens.shape == (0, 64) and rows.target.shape == (0, 16)
    assert (rows.unique_tok, rows.repeated_tok, rows.linear_tok, rows.calls) == (0, 0, 0, ())
    assert rows.padding_tok == 0 and rows.sharing == 1.0


@pytest.mark.parametrize("wrong", [(64,), (100,), (0,), (8, 8)])
def test_wrong_shorter_lengths_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="from 1 to row_tok - 1 = 63"):
        PackConfig(row_tok=64, shorter=wrong)
    with pytest.raises(ConfigError, match="above 0"):
        PackConfig(row_tok=64, train_tok=0)


@pytest.mark.parametrize(
    ("call", "config"),
    [
        (make_call(0, [1] * 50, [2]), PackConfig(row_tok=32, train_tok=8)),
        (make_call(0, [1], [2] * 9), PackConfig(row_tok=32, train_tok=8)),
    ],
)
def test_a_call_longer_than_a_row_is_an_error_that_says_what_to_raise(
    call: CallRecord, config: PackConfig
) -> None:
    with pytest.raises(ConfigError, match="row_tok=32, train_tok=8"):
        pack([select_calls([call], KEEP_ALL)], config)


def test_siblings_share_their_prompt_in_a_row() -> None:
    root = tuple(range(100, 150))
    rollouts = [[make_call(0, [*root, i], [1, 2], episode=f"e{i}")] for i in range(8)]
    selections = [select_calls(calls, KEEP_ALL) for calls in rollouts]
    (rows,) = pack(selections, PackConfig(row_tok=128, train_tok=64))
    assert rows.tokens.shape[0] == 1
    assert rows.unique_tok == 50 + 8 * 3
    assert rows.linear_tok == 8 * 53
    assert rows.sharing == 8 * 53 / (50 + 8 * 3)
    (apart,) = pack(selections, PackConfig(row_tok=128, train_tok=64, share_context=False))
    assert apart.unique_tok == apart.linear_tok and apart.sharing == 1.0


def test_groups_are_not_mixed_where_their_rows_have_room() -> None:
    """Two tasks with prompts of their own: each row takes rollouts of one task."""
    selections = []
    for i in range(8):
        prompt = [*range(100 * (i % 2), 100 * (i % 2) + 50), i]
        selections.append(select_calls([make_call(0, prompt, [1, 2], episode=f"e{i}")], KEEP_ALL))
    (rows,) = pack(selections, PackConfig(row_tok=70, train_tok=64))
    assert rows.tokens.shape[0] == 2 and rows.repeated_tok == 0
    tasks = [{n % 2 for n in rows.rollout[r][rows.mask[r]].tolist()} for r in range(2)]
    assert sorted(map(len, tasks)) == [1, 1]


def test_a_cut_rollouts_pieces_share_a_row_with_their_kin() -> None:
    """What the pieces of one rollout have in common counts as shared as well, turns included."""
    calls = [make_call(0, list(range(30)), [40])]
    calls += [make_call(1 + i, [*range(30), 40, 50 + i], [60] * 9) for i in range(4)]
    (rows,) = pack([select_calls(calls, KEEP_ALL)], PackConfig(row_tok=60, train_tok=20))
    assert rows.tokens.shape[0] == 2
    assert rows.unique_tok == 31 + 4 * 10 and rows.repeated_tok == 31


def test_versions_share_context_only_where_asked() -> None:
    def rollout(name: str, versions: list[int]) -> Selection:
        call = make_call(0, [*range(20)], [7, 8], episode=name)
        done = dataclasses.replace(call.completion, versions=np.array(versions, np.uint32))
        return select_calls([dataclasses.replace(call, completion=done)], KEEP_ALL)

    made = [[1, 1], [1, 1], [2, 2], [1, 2], [1, 2]]
    selections = [rollout(f"e{i}", versions) for i, versions in enumerate(made)]
    (together,) = pack(selections, PackConfig(row_tok=128, train_tok=32))
    assert together.unique_tok == 20 + 5 * 2
    (apart,) = pack(selections, PackConfig(row_tok=128, train_tok=32, share_versions=False))
    assert apart.tokens.shape[0] == 1 and apart.repeated_tok == 0
    assert apart.unique_tok == 4 * 20 + 5 * 2


def test_a_turn_of_older_weights_is_context_of_the_newer_call_alone() -> None:
    """Routing replay: the newer call's prompt was routed by its own weights, the old turn too."""
    old = make_call(0, [1, 2], [3], version=1)
    new = make_call(1, [1, 2, 3, 4], [5], version=2)
    config = PackConfig(row_tok=32, train_tok=8, share_versions=False)
    (rows,) = pack([select_calls([old, new], KEEP_ALL)], config)
    assert rows.tokens[0][rows.first[0] >= 0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert rows.first[0][:8].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows.target[0][rows.mask[0]].tolist() == [2, 7]


def test_packing_compares_a_prompt_twice_however_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once to see what all share, once for the row; not once for every row that it might go to."""
    selections = []
    for i in range(40):
        calls = [make_call(0, [*range(1000), 2000 + i], [1, 2], episode=f"e{i}")]
        for j in range(1, 5):
            before = calls[-1]
            prompt = [*before.prompt_ids.tolist(), *before.completion.ids.tolist(), 3000 + j]
            calls.append(make_call(j, prompt, [1, 2], episode=f"e{i}"))
        selections.append(select_calls(calls, KEEP_ALL))
    for row_tok, rows in ((1100, 7), (4096, 1)):
        comparisons = Comparisons(monkeypatch)
        parts = pack(selections, PackConfig(row_tok=row_tok, train_tok=1024))
        assert len(parts[0].tokens) == rows
        assert comparisons.compared_tok <= 2 * 40 * 1001

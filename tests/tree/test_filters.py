"""Each rule for leaving a call out, and the two known faults that show in a tree (A2, A7)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.types import CallRecord, Delivery, Role, Span
from clawgym_jax.tree.filters import (
    DEAD_LEAF,
    EMPTY,
    OVER_BRANCHING,
    UNDELIVERED_LEAF,
    FilterConfig,
    select_calls,
)
from clawgym_jax.tree.flatten import flatten
from tests.tree.histories import make_call, random_rollout

ALL_ROLES = FilterConfig(auxiliary_calls=False)
LOST = [Delivery.DISCONNECTED, Delivery.SUPERSEDED]


def sent(call: CallRecord, delivery: Delivery = Delivery.DELIVERED) -> CallRecord:
    return dataclasses.replace(call, delivery=delivery)


def sub(ordinal: int, prompt: list[int], ids: list[int], chain: str = "sub") -> CallRecord:
    return make_call(ordinal, prompt, ids, role=Role.SUBAGENT, chain=chain)


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 1, 3]), st.booleans())
def test_every_call_is_kept_or_has_one_reason(
    seed: int, dead: bool, most: int, auxiliary: bool
) -> None:
    calls = random_rollout(seed)
    selection = select_calls(calls, FilterConfig(dead, most, auxiliary))
    assert sorted([*selection.kept, *selection.dropped]) == list(range(len(calls)))
    allowed = {DEAD_LEAF} if dead else set()
    allowed |= {OVER_BRANCHING} if most else set()
    allowed |= {"auxiliary call: sub-agent"} if auxiliary else set()
    assert set(selection.dropped.values()) <= allowed
    assert sum(selection.dropped_tok().values()) == sum(
        calls[i].completion_tok for i in selection.dropped
    )


def test_a_leaf_that_the_agent_left_is_dead_and_the_last_one_is_not() -> None:
    calls = [make_call(i, [1, 2], [3 + i]) for i in range(3)]
    assert select_calls(calls, FilterConfig()).dropped == {0: DEAD_LEAF, 1: DEAD_LEAF}
    assert select_calls(calls, FilterConfig(dead_leaves=False)).kept == (0, 1, 2)


def test_an_extended_call_is_no_leaf() -> None:
    first = make_call(0, [1, 2], [3])
    retry = make_call(1, [1, 2], [4])
    after_first = make_call(2, [1, 2, 3, 8], [5])
    assert select_calls([first, retry, after_first], FilterConfig()).dropped == {1: DEAD_LEAF}


def test_a_continued_leaf_is_not_dead_and_does_not_branch() -> None:
    """A moving tail: each turn re-appears behind changed context, so no call extends another."""
    calls = [make_call(0, [1, 9], [3])]
    for i in range(1, 6):
        prompt = [1, *range(3, 3 + i), 8, 9]
        spans = (Span(i, 1, f"e.{i - 1}"),)
        calls.append(make_call(i, prompt, [3 + i], spans, continues=(f"e.{i - 1}",)))
    selection = select_calls(calls, FilterConfig(max_leaves=1))
    assert not any(selection.tree.extends)
    assert selection.kept == tuple(range(6)) and selection.leaves == 1
    not_told = [dataclasses.replace(call, continues=()) for call in calls]
    assert select_calls(not_told, FilterConfig(max_leaves=5)).kept == ()
    assert select_calls(not_told, FilterConfig(max_leaves=6)).kept == (5,)


def test_over_branching_drops_the_whole_rollout_and_can_be_switched_off() -> None:
    calls = [make_call(i, [1, 2], [i]) for i in range(4)]
    selection = select_calls(calls, FilterConfig(max_leaves=3))
    assert selection.dropped == {**dict.fromkeys(range(3), DEAD_LEAF), 3: OVER_BRANCHING}
    assert select_calls(calls, FilterConfig(max_leaves=4)).kept == (3,)
    assert select_calls(calls, FilterConfig(max_leaves=0)).kept == (3,)


def test_untrained_auxiliary_calls_do_not_branch() -> None:
    calls = [make_call(0, [1, 2], [3])]
    calls += [sub(1 + i, [5, 5], [i], f"sub{i}") for i in range(4)]
    selection = select_calls(calls, FilterConfig(max_leaves=1))
    assert selection.kept == (0,) and selection.leaves == 1
    assert set(selection.dropped.values()) == {"auxiliary call: sub-agent"}
    trained = select_calls(calls, dataclasses.replace(ALL_ROLES, max_leaves=4))
    assert trained.kept == () and trained.leaves == 5


def test_main_segments_on_both_sides_of_a_compaction_stay() -> None:
    retry = make_call(0, [1, 2], [7])
    main = make_call(1, [1, 2], [3])
    compaction = make_call(2, [1, 8], [5], role=Role.COMPACTION)
    after = make_call(3, [1, 6], [4])
    selection = select_calls([retry, main, compaction, after], FilterConfig())
    assert selection.kept == (1, 3)
    assert selection.dropped == {0: DEAD_LEAF, 2: "auxiliary call: compaction"}


def test_one_agents_compaction_does_not_cut_anothers_segment() -> None:
    left = make_call(0, [1, 2], [3])
    compaction = make_call(1, [5, 8], [5], role=Role.COMPACTION, chain="sub")
    last = make_call(2, [1, 2], [4])
    assert select_calls([left, compaction, last], FilterConfig()).dropped[0] == DEAD_LEAF


@pytest.mark.parametrize("role", [Role.COMPACTION, Role.TITLE, Role.PROBE])
def test_a_trained_side_request_is_a_segment_of_its_own(role: Role) -> None:
    """Nobody goes on from a title; it is where its request led to, not a dead end."""
    main = make_call(0, [1, 2], [3])
    side = make_call(1, [1, 8], [5], role=role)
    other = make_call(2, [1, 7], [5], role=role)
    after = make_call(3, [1, 2, 3, 6], [4])
    calls = [main, side, other, after]
    assert select_calls(calls, ALL_ROLES).kept == (0, 1, 2, 3)
    reasons = dict.fromkeys([1, 2], f"auxiliary call: {role}")
    assert select_calls(calls, FilterConfig()).dropped == reasons


def test_of_a_repeated_side_request_the_last_counts() -> None:
    main = make_call(0, [1, 2], [3])
    summaries = [make_call(1 + i, [1, 2, 3, 8], [5 + i], role=Role.COMPACTION) for i in range(2)]
    assert select_calls([main, *summaries], ALL_ROLES).dropped == {1: DEAD_LEAF}


@pytest.mark.parametrize("config", [FilterConfig(), ALL_ROLES])
def test_a_call_that_sampled_nothing_is_told_so(config: FilterConfig) -> None:
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [])]
    selection = select_calls(calls, config)
    assert selection.dropped == {1: EMPTY} and selection.leaves == 0


@pytest.mark.parametrize("lost", LOST)
def test_an_abandoned_last_call_is_an_undelivered_leaf(lost: Delivery) -> None:
    first = sent(make_call(0, [1, 2], [3]))
    last = sent(make_call(1, [1, 2, 3, 4], [5]), lost)
    assert select_calls([first, last], FilterConfig()).dropped == {1: UNDELIVERED_LEAF}
    assert select_calls([first, last], FilterConfig(dead_leaves=False)).kept == (0, 1)


@pytest.mark.parametrize("lost", LOST)
def test_the_delivered_answer_is_the_last_one_when_its_repeat_was_lost(lost: Delivery) -> None:
    taken = sent(make_call(0, [1, 2], [3]))
    repeats = [sent(make_call(i, [1, 2], [3 + i]), lost) for i in (1, 2)]
    selection = select_calls([taken, *repeats], FilterConfig())
    assert selection.kept == (0,)
    assert selection.dropped == {1: UNDELIVERED_LEAF, 2: UNDELIVERED_LEAF}


def test_an_abandoned_call_stays_where_its_turn_was_used_or_is_all_there_is() -> None:
    lost = Delivery.DISCONNECTED
    alone = [sent(make_call(0, [1, 2], [3]), lost)]
    assert select_calls(alone, FilterConfig()).kept == (0,)
    extended = [sent(make_call(0, [1], [3])), sent(make_call(1, [1, 3, 2], [4]), lost)]
    extended.append(sent(make_call(2, [1, 3, 2, 4, 5], [6])))
    assert select_calls(extended, FilterConfig()).kept == (0, 1, 2)
    continued = [*extended[:2], sent(make_call(2, [9, 4, 5], [6], continues=("e.1",)))]
    assert select_calls(continued, FilterConfig()).kept == (0, 1, 2)


def test_what_was_delivered_in_another_segment_does_not_count() -> None:
    main = sent(make_call(0, [1, 2], [3]))
    below = sent(sub(1, [5, 5], [6]), Delivery.DISCONNECTED)
    compaction = sent(make_call(2, [1, 2, 3, 8], [5], role=Role.COMPACTION))
    after = sent(make_call(3, [1, 6], [4]), Delivery.DISCONNECTED)
    assert select_calls([main, below, compaction, after], ALL_ROLES).kept == (0, 1, 2, 3)


def test_an_unknown_delivery_is_no_reason_to_drop() -> None:
    """After a crash every answer is pending."""
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [5])]
    assert select_calls(calls, FilterConfig()).kept == (0, 1)
    pending = [calls[0], sent(calls[1], Delivery.DISCONNECTED)]
    assert select_calls(pending, FilterConfig()).kept == (0, 1)


THINK, SAY = [21, 22], [31]  # a turn is thinking, then what it says


def turns(with_thinking: bool) -> list[CallRecord]:
    """Three turns with reasoning; the history is replayed with it or without."""
    calls: list[CallRecord] = []
    prompt, spans = [1, 2], ()
    for i in range(3):
        ids = [*THINK, *SAY, 40 + i]
        before = tuple(c.call_id for c in calls)
        calls.append(make_call(i, prompt, ids, spans, continues=before))
        if with_thinking:
            spans = (*spans, Span(len(prompt), len(ids), f"e.{i}"))
        prompt = [*prompt, *(ids if with_thinking else ids[2:]), 50 + i]
    return calls


def test_a2_replayed_thinking_is_an_exact_continuation() -> None:
    selection = select_calls(turns(True), FilterConfig())
    assert selection.tree.extends == [(), (0,), (0, 1)]
    assert selection.kept == (0, 1, 2) and selection.leaves == 1
    assert len(flatten(selection.tree).tokens) == 2 + 3 * 4 + 2  # every turn stands there once


def test_a2_dropped_thinking_is_a_branch_and_nobody_sees_what_the_model_did_not() -> None:
    calls = turns(False)
    selection = select_calls(calls, FilterConfig())
    assert selection.tree.extends == [(), (), ()]
    assert selection.kept == (0, 1, 2) and selection.leaves == 1
    flat = flatten(selection.tree)
    assert len(flat.target) == 3 * 4  # trained where it was sampled, and only there
    for i, call in enumerate(calls):
        last = int(flat.target[flat.call == i][-1])
        seen = flat.tokens[[j for j in range(last + 1) if last < flat.end[j]]].tolist()
        assert seen == [*call.prompt_ids.tolist(), *call.completion.ids.tolist()]
        assert seen.count(THINK[0]) == 1


@pytest.mark.parametrize("chains", [("main", "sub"), ("s", "s")])
def test_a7_interleaved_agents_are_two_leaves_in_two_segments(chains: tuple[str, str]) -> None:
    """A1 B1 A2 B2; the second case has one name for both, as a harness without headers may."""
    a, b = chains
    calls = [
        make_call(0, [1, 2], [3], chain=a),
        sub(1, [5, 6], [7], chain=b),
        make_call(2, [1, 2, 3, 2], [4], chain=a),
        sub(3, [5, 6, 7, 6], [8], chain=b),
    ]
    selection = select_calls(calls, ALL_ROLES)
    assert selection.kept == (0, 1, 2, 3) and selection.leaves == 2
    assert selection.tree.extends == [(), (), (0,), (1,)]
    main = select_calls(calls, FilterConfig())
    assert main.kept == (0, 2) and main.leaves == 1


def test_a_sub_agents_dead_leaf_is_its_own() -> None:
    calls = [sub(0, [5, 6], [7]), make_call(1, [1, 2], [3]), sub(2, [5, 6], [8])]
    assert select_calls(calls, ALL_ROLES).dropped == {0: DEAD_LEAF}

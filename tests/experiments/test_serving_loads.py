"""What the serving benchmark asks for is what was recorded, and the same for every contestant."""

import itertools

import numpy as np
import pytest

from experiments.bench.serving_parts import loads, verdicts
from experiments.bench.tree_parts import structure

VOCABULARY = 1024
RECORDED = [load for load in loads.LOADS if load.groups]


def common(a: list[int], b: list[int]) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:size]) != np.array(b[:size]))
    return int(differ[0]) if len(differ) else size


@pytest.mark.parametrize("load", loads.LOADS, ids=lambda load: load.name)
@pytest.mark.parametrize("count", verdicts.COUNTS)
def test_as_many_rollouts_as_asked_that_fit_the_window(load: loads.Load, count: int) -> None:
    asked = loads.rollouts(load, count, 0, VOCABULARY)
    assert len(asked) == count
    longest = max(len(turn["prompt"]) + turn["new_tok"] for turns in asked for turn in turns)
    assert longest <= load.window_tok and longest <= max(load.kv_buckets)
    assert asked == loads.rollouts(load, count, 0, VOCABULARY)
    assert asked != loads.rollouts(load, count, 1, VOCABULARY)


@pytest.mark.parametrize("load", RECORDED, ids=lambda load: load.name)
def test_turns_have_the_recorded_lengths_and_grow(load: loads.Load) -> None:
    group = structure.stored(load.groups[0])
    asked = loads.rollouts(load, 8, 0, VOCABULARY)
    for turns, recorded in zip(asked, group.rollouts, strict=True):
        for turn, form in zip(turns, recorded, strict=True):
            assert len(turn["prompt"]) == pytest.approx(form.prompt / load.thin, rel=0.06)
            assert abs(turn["new_tok"] - form.completion / load.thin) <= 1
        for before, after in itertools.pairwise(turns):
            assert common(before["prompt"], after["prompt"]) == len(before["prompt"])


@pytest.mark.parametrize("load", RECORDED, ids=lambda load: load.name)
def test_a_group_shares_its_first_prompt_and_groups_the_programs_part(load: loads.Load) -> None:
    firsts = [turns[0]["prompt"] for turns in loads.rollouts(load, 32, 0, VOCABULARY)]
    kinds = len(load.groups)
    for g in range(4):
        group = firsts[8 * g : 8 * (g + 1)]
        assert min(common(group[0], other) for other in group) > 0.9 * len(group[0])
    part = structure.stored(load.groups[0]).other_task_tok / load.thin
    assert common(firsts[0], firsts[8 * kinds]) == pytest.approx(part, rel=0.06)
    others = [firsts[8 * g][:20] for g in range(1, kinds)]
    assert all(common(firsts[0], other) < 20 for other in others)


@pytest.mark.parametrize("load", RECORDED, ids=lambda load: load.name)
def test_without_sharing_lengths_stay_and_no_two_prompts_begin_alike(load: loads.Load) -> None:
    asked = loads.rollouts(load, 32, 0, VOCABULARY)
    other = loads.nothing_shared(asked, 0, VOCABULARY)
    shape = [[(len(t["prompt"]), t["new_tok"]) for t in turns] for turns in asked]
    assert shape == [[(len(t["prompt"]), t["new_tok"]) for t in turns] for turns in other]
    starts = [tuple(turn["prompt"][:2]) for turns in other for turn in turns]
    assert len(set(starts)) == len(starts)
    assert loads.new_tok(other) == loads.new_tok(asked)


def test_goals_take_the_faster_hugging_face_and_each_load_apart() -> None:
    def row(load: str, contestant: str, ratio: float, requests: int = 32) -> verdicts.Row:
        return {"part": "throughput", "load": load, "contestant": contestant,
                "requests": requests, "native_is_faster": ratio}  # fmt: skip

    rows = [
        row("a", "huggingface", 9.0),
        row("a", "huggingface-eager", 4.9),
        row("a", "huggingface", 1.0, requests=8),
        row("b", "huggingface", 5.0),
        row("b", "jetstream", 1.2),
    ]
    said = {goal["name"]: goal["ok"] for goal in verdicts.goals(rows)}
    assert said == {
        "native / Hugging Face at 32 requests, a": False,
        "native / Hugging Face at 32 requests, b": True,
        "native / jetstream at 32 requests, b": False,
    }


def test_agreement_is_of_whole_completions() -> None:
    assert verdicts.agree([[[1, 2], [3]], [[4]]], [[[1, 2], [9]], [[4]]]) == [True, False, True]

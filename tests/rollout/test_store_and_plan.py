"""A step's plan depends on (seed, step) alone; a run's episodes come back as they were logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import EpisodeRecord, Grade, Outcome
from clawgym_jax.harness.tiny_chat import TinyChat
from clawgym_jax.harness.tiny_shell import TinyShell
from clawgym_jax.rollout.group import plan_each, plan_step
from clawgym_jax.rollout.store import CALLS, EPISODES, EpisodeStore
from clawgym_jax.tasks.toy import toy_tasks
from tests.tree.histories import make_call

TASKS = toy_tasks("train", 20, 0)
HARNESSES = [TinyChat(), TinyShell()]


def plan(step: int = 3, seed: int = 0, instances: int = 6):
    return plan_step(
        TASKS, HARNESSES, split="train", step=step, seed=seed, instances=instances, group_size=4
    )


def test_a_plan_is_a_function_of_seed_and_step() -> None:
    assert plan() == plan()
    assert plan(step=4) != plan()
    assert [i.task for i in plan(seed=1)] != [i.task for i in plan()]


def test_groups_are_per_task_and_harness_and_harnesses_share_evenly() -> None:
    instances = plan()
    assert len(instances) == 24
    groups = {i.group_id for i in instances}
    assert len(groups) == 6
    for group in groups:
        members = [i for i in instances if i.group_id == group]
        assert len(members) == 4
        assert len({(i.task.task_id, i.harness.name) for i in members}) == 1
        assert len({i.seed for i in members}) == 4
    names = [i.harness.name for i in instances]
    assert names.count("tiny_chat") == names.count("tiny_shell") == 12


def test_no_task_twice_before_all_were_drawn() -> None:
    tasks = [i.task.task_id for i in plan(instances=40)][::4]
    assert len(set(tasks[:20])) == 20
    assert len(set(tasks[20:])) == 20


def test_evaluation_plays_every_task_through_every_harness() -> None:
    instances = plan_each(TASKS, HARNESSES, split="heldout", step=0, seed=0)
    assert len(instances) == 40
    assert len({i.episode_id for i in instances}) == 40


def log_episode(folder: Path, name: str, seed: int, call_ids: tuple[str, ...]) -> None:
    record = EpisodeRecord(
        run_id="r", episode_id=name, group_id="g", task_id="t", harness="h", split="train",
        step=3, seed=seed, outcome=Outcome.OK, detail="", grade=Grade(1.0), call_ids=call_ids,
        timings_s={"total": 0.5},
    )  # fmt: skip
    with RecordLog(folder / EPISODES) as log:
        log.append(record)


def test_the_store_gives_back_what_was_logged(tmp_path: Path) -> None:
    assert len(EpisodeStore(tmp_path)) == 0
    first = plan()[0]
    with RecordLog(tmp_path / CALLS) as log:
        for ordinal in range(3):
            log.append(make_call(ordinal, [1, 2, 3], [4], episode=first.episode_id))
    ids = (f"{first.episode_id}.0", f"{first.episode_id}.2")
    log_episode(tmp_path, first.episode_id, first.seed, ids)
    done, todo = EpisodeStore(tmp_path).take(plan())
    assert [c.call_id for c in done[first.episode_id].calls] == list(ids)
    assert len(todo) == 23
    assert EpisodeStore(tmp_path).steps("train") == [3]
    assert EpisodeStore(tmp_path).of("train", 3)[0].record.grade.score == 1.0
    other_seed, _ = EpisodeStore(tmp_path).take(plan(seed=9))
    assert other_seed == {}


def test_an_episode_without_its_calls_is_an_error(tmp_path: Path) -> None:
    log_episode(tmp_path, "x", 0, ("x.0",))
    with pytest.raises(RecordError, match="lacks calls"):
        EpisodeStore(tmp_path)

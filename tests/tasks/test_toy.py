"""Toy tasks: reproducible, disjoint splits, and graders that give 1 to the answer alone."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.interfaces import SandboxFactory, Task
from clawgym_jax.core.names import NAME_PATTERN, name_split
from clawgym_jax.core.types import Grade
from clawgym_jax.tasks.clawgym import load_task
from clawgym_jax.tasks.task import write_folder
from clawgym_jax.tasks.toy import FAMILIES, ToyTask, toy_tasks

SPLITS = ["pretrain", "cold", "train", "heldout"]


def names_in(task: ToyTask) -> set[str]:
    assert isinstance(task.inputs, dict)
    words = " ".join([*task.inputs, *(text.decode() for text in task.inputs.values()), task.output])
    fixed = {"in", "out", *("txt", "csv", "log", "md")}
    return {word for word in re.findall(r"[a-z]+", words) if word not in fixed}


def content_of(task: ToyTask, name: str) -> list[str]:
    assert isinstance(task.inputs, dict)
    return task.inputs[name].decode().splitlines()


@given(st.sampled_from(SPLITS), st.integers(0, 10**6), st.integers(1, 12))
def test_names_belong_to_the_split(split, seed: int, count: int) -> None:
    for task in toy_tasks(split, count, seed):
        for name in names_in(task):
            assert NAME_PATTERN.fullmatch(name) and name_split(name) == split


def test_train_and_heldout_are_disjoint() -> None:
    train, heldout = toy_tasks("train", 200, 1), toy_tasks("heldout", 200, 1)
    assert not set().union(*map(names_in, train)) & set().union(*map(names_in, heldout))
    assert not {t.instruction for t in train} & {t.instruction for t in heldout}


def test_the_same_seed_gives_the_same_tasks_and_longer_lists_extend() -> None:
    assert toy_tasks("train", 20, 3)[:7] == toy_tasks("train", 7, 3)
    assert toy_tasks("train", 7, 3) != toy_tasks("train", 7, 4)
    ids = [task.task_id for task in toy_tasks("train", 50, 3)]
    assert len(set(ids)) == 50


@given(st.integers(0, 10**6))
def test_answers_are_what_the_instruction_asks(seed: int) -> None:
    tasks = toy_tasks("train", len(FAMILIES), seed)
    assert [task.family for task in tasks] == list(FAMILIES)
    for task in tasks:
        lines = content_of(task, task.source)
        stem = task.source.rsplit(".", 1)[0]
        note = task.output.removeprefix("out/").removesuffix(".md")
        assert task.instruction.endswith(f" to the note {note}.")
        assert stem in task.instruction and task.source not in task.instruction
        asked = task.instruction.split(" to ")[0]
        if task.family == "value":
            key = asked.removeprefix("Write the value of ").split(" in ")[0]
            assert dict(line.split("=") for line in lines)[key] == task.expected
        elif task.family == "count":
            assert task.expected == str(len(lines)) and 2 <= len(lines) <= 8
        else:
            wanted = {"copy": lines, "first": lines[:1], "last": lines[-1:]}[task.family]
            assert task.expected.splitlines() == wanted
        assert 2 <= len(task.inputs or ()) <= 3
        stems = [name.rsplit(".", 1)[0] for name in task.inputs or ()]
        assert stems.count(stem) == 1


def graded(task: Task, workspace: Path, sandboxes: SandboxFactory) -> Grade:
    return asyncio.run(task.grade(workspace, sandboxes))


def test_the_answer_scores_one_and_nothing_else_does(
    sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    for task in toy_tasks("train", len(FAMILIES), 11):
        workspace = tmp_path / task.task_id
        workspace.mkdir()
        task.fill(workspace)
        assert list((workspace / "out").iterdir()) == []
        assert graded(task, workspace, sandboxes).score == 0.0
        (workspace / task.output).write_text(task.expected + "\n")
        grade = graded(task, workspace, sandboxes)
        assert (grade.score, grade.reason, grade.checks) == (1.0, "", {"match": 1.0})
        (workspace / task.output).write_text(f"x{task.expected}")
        assert graded(task, workspace, sandboxes).score == 0.0


def test_hostile_outputs_score_zero(sandboxes: SandboxFactory, tmp_path: Path) -> None:
    """A13: an output that points at the grader, a folder or a fifo in its place."""
    task = toy_tasks("train", 1, 5)[0]
    plants = {
        "link": lambda path: path.symlink_to("../reward/check.py"),
        "folder": lambda path: path.mkdir(),
        "fifo": lambda path: os.mkfifo(path),
        "self": lambda path: path.symlink_to(path.name),
        "bytes": lambda path: path.write_bytes(b"\xff\x00" * 100),
    }
    for name, plant in plants.items():
        workspace = tmp_path / name
        workspace.mkdir()
        task.fill(workspace)
        plant(workspace / task.output)
        assert graded(task, workspace, sandboxes).score == 0.0, name


@pytest.mark.parametrize("answered", [True, False])
def test_a_written_folder_scores_the_same(
    sandboxes: SandboxFactory, tmp_path: Path, answered: bool
) -> None:
    for task in toy_tasks("heldout", 2, 2):
        folder, workspace = tmp_path / task.task_id, tmp_path / f"w{task.task_id}"
        write_folder(task, folder)
        loaded = load_task(folder)
        assert (loaded.task_id, loaded.instruction) == (task.task_id, task.instruction)
        assert (loaded.mount, loaded.metadata) == (task.mount, task.metadata)
        loaded.fill(workspace)
        if answered:
            (workspace / task.output).write_text(task.expected)
        wanted = 1.0 if answered else 0.0
        assert graded(loaded, workspace, sandboxes).score == wanted
        # And its reward.sh, run as ClawGym runs it: in the workspace, last line is the score.
        shutil.copytree(folder / "reward", workspace / "reward")
        script = ["bash", str(workspace / "reward" / "reward.sh")]
        done = subprocess.run(script, capture_output=True, text=True, check=True)
        assert float(done.stdout.splitlines()[-1]) == wanted

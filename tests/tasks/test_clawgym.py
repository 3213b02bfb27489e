"""ClawGym's public tasks load, and reference answers score 1.0 with graders of our own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym_jax.core.errors import TaskError
from clawgym_jax.core.interfaces import SandboxFactory
from clawgym_jax.core.types import Grade
from clawgym_jax.tasks.clawgym import load_rows, load_task, load_tasks
from clawgym_jax.tasks.grading import Scoring
from clawgym_jax.tasks.task import DEFAULT_MOUNT, FolderTask, write_files
from tests.tasks.conftest import DATA, GRADERS


def write(workspace: Path, files: dict[str, str]) -> None:
    write_files({name: text.encode() for name, text in files.items()}, workspace)


def answer_0176(workspace: Path) -> None:
    files = {f"output/diagrams/{chord}.txt": f"{chord}\n" for chord in ("G", "D", "Em", "C")}
    files["output/progression.txt"] = "G D Em C\n"
    files["output/normalized_chords.json"] = '["G", "D", "Em", "C"]'
    files["output/unsupported.json"] = "[]"
    write(workspace, files)


def answer_0185(workspace: Path) -> None:
    words = "init|template python|config|check|build|test|docs|status|deploy|clean".split("|")
    commands = [f"bash-themes {word}" for word in words]
    plan = {
        "project_name": "acme-web",
        "bash_themes_dir": "output/.bash-themes",
        "commands": commands,
    }
    usage = "\n".join(commands)
    write(workspace, {"output/plan.json": json.dumps(plan), "output/USAGE.md": usage})


def answer_1840(workspace: Path) -> None:
    people = ("person_alice_johnson", "person_bob")
    graph = [json.dumps({"op": "upsert", "id": person}) for person in people]
    graph.append(json.dumps({"op": "relate", "rel": "works_at", "from": people[1]}))
    files = {
        "output/ontology/graph.jsonl": "\n".join(graph),
        "output/feedback/sync-feedback.md": "# Missing\n- [ ] Bob: email\n",
    }
    write(workspace, files)


ANSWERS = {"task_0176": answer_0176, "task_0185": answer_0185, "task_1840": answer_1840}


def with_our_grader(task: FolderTask, **scoring: bool) -> FolderTask:
    reward = GRADERS / task.task_id
    return dataclasses.replace(task, reward=reward, score=Scoring(**scoring))


def grade(task: FolderTask, workspace: Path, sandboxes: SandboxFactory) -> Grade:
    return asyncio.run(task.grade(workspace, sandboxes))


def test_the_three_sample_tasks_load() -> None:
    tasks = {task.task_id: task for task in load_tasks(DATA)}
    assert list(tasks) == ["task_0176", "task_0185", "task_1840"]
    assert all(task.mount == DEFAULT_MOUNT for task in tasks.values())  # 0176 names none
    assert tasks["task_0176"].inputs is None and tasks["task_0176"].reward is None
    assert tasks["task_1840"].instruction.startswith("Run an ontology sync")
    assert [t.task_id for t in load_tasks(DATA, limit=2)] == ["task_0176", "task_0185"]
    assert [t.task_id for t in load_tasks(DATA, ids=["task_1840"])] == ["task_1840"]


def test_fill_copies_the_input_files_and_nothing_else(tmp_path: Path) -> None:
    load_task(DATA / "task_1840").fill(tmp_path)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md"))
    assert found[-1] == "input/obsidian_vault/references/contacts/Bob.md" and len(found) == 3
    source = DATA / "task_1840/input_files/input/obsidian_config.yaml"
    assert (tmp_path / "input/obsidian_config.yaml").read_bytes() == source.read_bytes()
    load_task(DATA / "task_0176").fill(tmp_path / "none")


@pytest.mark.parametrize("task_id", ANSWERS)
def test_the_reference_answer_scores_one(
    task_id: str, sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    task = with_our_grader(load_task(DATA / task_id))
    workspace = tmp_path / "w"
    workspace.mkdir()
    task.fill(workspace)
    assert grade(task, workspace, sandboxes).score == 0.0
    ANSWERS[task_id](workspace)
    assert grade(task, workspace, sandboxes).score == 1.0


def test_the_weighted_reward_counts_in_the_mean_unless_taken_alone(
    sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    """0185's checks without USAGE.md: 1, 1, 0 and "reward" 0.8; mean 0.7."""
    load_task(DATA / "task_0185").fill(tmp_path)
    answer_0185(tmp_path)
    (tmp_path / "output/USAGE.md").unlink()
    task = load_task(DATA / "task_0185")
    assert grade(with_our_grader(task), tmp_path, sandboxes).score == pytest.approx(0.7)
    alone = grade(with_our_grader(task, reward_key_only=True), tmp_path, sandboxes)
    assert alone.score == pytest.approx(0.8)
    assert alone.checks == {"keys": 1.0, "commands": 1.0, "usage": 0.0, "reward": 0.8}


def test_a_task_without_a_grader_is_not_a_zero(sandboxes: SandboxFactory, tmp_path: Path) -> None:
    result = grade(load_task(DATA / "task_0176"), tmp_path, sandboxes)
    assert result.score is None and "no reward folder" in result.reason


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda entry: entry.pop("user_query"), "user_query"),
        (lambda entry: entry.update(task_id=7), "task_id"),
        (lambda entry: entry.update(input_mount_dir="relative"), "absolute"),
        (lambda entry: entry.update(input_mount_dir="/"), "absolute path of a folder"),
        (lambda entry: entry.update(input_mount_dir="/work/../etc"), "absolute path of a folder"),
        (lambda entry: entry.update(input_mount_dir="/usr/share"), "folder of the system"),
        (lambda entry: entry.update(input_mount_dir=["/work"]), "absolute path of a folder"),
        (lambda entry: entry.update(user_query="Do\0it."), "NUL"),
        (lambda entry: entry.update(user_query="Do \ud800."), "half a surrogate"),
    ],
)
def test_malformed_folders_say_what_is_wrong(
    tmp_path: Path, break_it: Callable[[dict], object], message: str
) -> None:
    entry = {"task_id": "task_1", "user_query": "Do it.", "metadata": {}}
    break_it(entry)
    (tmp_path / "data_entry.json").write_text(json.dumps(entry))
    with pytest.raises(TaskError, match=message):
        load_task(tmp_path)
    with pytest.raises(TaskError, match="is it the right folder"):
        load_tasks(tmp_path)


@pytest.mark.parametrize("plant", ["dangling", "out", "loop", "fifo"])
def test_inputs_that_no_agent_can_be_given_are_named(tmp_path: Path, plant: str) -> None:
    inputs, workspace = tmp_path / "task/input_files", tmp_path / "workspace"
    (inputs / "deep").mkdir(parents=True)
    (inputs / "a.txt").write_text("a")
    (inputs / "deep/fine").symlink_to("../a.txt")
    entry = {"task_id": "task_1", "user_query": "Do it.", "metadata": {}}
    (tmp_path / "task/data_entry.json").write_text(json.dumps(entry))
    load_task(tmp_path / "task").fill(workspace)
    assert os.readlink(workspace / "deep/fine") == "../a.txt"
    bad = inputs / "deep/bad"
    if plant == "fifo":
        os.mkfifo(bad)
    else:
        bad.symlink_to({"dangling": "nowhere", "out": "/etc/passwd", "loop": "bad"}[plant])
    with pytest.raises(TaskError, match=r"deep/bad: expected a file, a folder or a link within"):
        load_task(tmp_path / "task").fill(tmp_path / "another")


def test_rows_become_tasks(sandboxes: SandboxFactory, tmp_path: Path) -> None:
    check = (
        'import json, sys\nprint(json.dumps({"there": open(sys.argv[1] + "/out").read() == "1"}))'
    )
    row = {
        "prompt": "Write 1 to out.",
        "hook_code": "python3 reward/test.py",
        "input_files": [
            {"file_path": "input/a.txt", "content": "a"},
            {"file_path": "reward/test.py", "content": check},
        ],
        "origin_template": "---\nid: task_made_up\n---",
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n\n" + json.dumps({"prompt": "Second."}) + "\n")
    first, second = load_rows(path)
    assert (first.task_id, second.task_id) == ("task_made_up", "task_00002")
    workspace = tmp_path / "w"
    first.fill(workspace)
    assert [p.name for p in workspace.rglob("*.txt")] == ["a.txt"]
    assert not (workspace / "reward").exists()
    (workspace / "out").write_text("1")
    assert grade(first, workspace, sandboxes).score == 1.0
    path.write_text("{")
    with pytest.raises(TaskError, match="line 1"):
        list(load_rows(path))


def test_files_that_lead_out_of_the_workspace_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(TaskError, match="inside the workspace"):
            FolderTask("t", "i", inputs={name: b""}).fill(tmp_path / "w")

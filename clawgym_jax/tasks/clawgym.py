"""ClawGym's public tasks: its folders, and the rows they were made from.

A folder is `task_NNNN/{data_entry.json, input_files/**, reward/{reward.sh, check.py}}`:

    {"task_id": "task_0185", "user_query": "Read input/project.json and ...",
     "metadata": {"category": "", "grading_type": "automated"},
     "input_mount_dir": "/root/.openclaw/workspace"}

A row is {prompt, hook_code, input_files: [{file_path, content}], rule, origin_template}; its
reward/ files are the grader. Some tasks have no input files, no mount or no reward folder: they
load, and those without a grader say so when they are graded.
Invariant: nothing of a task runs here. Source: github.com/ClawGym/ClawGym-Agents (Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym_jax.core.errors import TaskError
from clawgym_jax.tasks.grading import Scoring
from clawgym_jax.tasks.task import DEFAULT_MOUNT, FolderTask, checked_mount, checked_text


def load_task(folder: Path, scoring: Scoring | None = None) -> FolderTask:
    """One task folder. Files are read when they are needed, not now."""
    entry = _read_entry(folder / "data_entry.json")
    mount = entry.get("input_mount_dir") or DEFAULT_MOUNT
    return FolderTask(
        task_id=checked_text(entry.get("task_id"), folder, "task_id"),
        instruction=checked_text(entry.get("user_query"), folder, "user_query"),
        mount=checked_mount(mount, folder),
        inputs=_folder(folder / "input_files"),
        reward=_folder(folder / "reward"),
        metadata=entry.get("metadata") or {},
        score=scoring or Scoring(),
    )


def load_tasks(
    root: Path,
    *,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
    scoring: Scoring | None = None,
) -> list[FolderTask]:
    """The tasks below `root` by name; all of them, the named ones, or the first `limit`."""
    if not root.is_dir():
        raise TaskError(f"expected a folder of ClawGym tasks, found none at {root}")
    folders = sorted(entry.parent for entry in root.glob("*/data_entry.json"))
    if ids is not None:
        by_name = {folder.name: folder for folder in folders}
        missing = [name for name in ids if name not in by_name]
        if missing:
            raise TaskError(f"{root} has no tasks {missing}; it has {len(folders)} others")
        folders = [by_name[name] for name in ids]
    if not folders:
        raise TaskError(f"{root} holds no */data_entry.json: is it the right folder?")
    return [load_task(folder, scoring) for folder in folders[:limit]]


def load_rows(path: Path, scoring: Scoring | None = None) -> Iterator[FolderTask]:
    """The tasks of a JSON-lines file of rows."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TaskError(f"{path}, line {number + 1}: not JSON: {error}") from error
            yield task_of_row(row, f"task_{number:05d}", scoring)


def task_of_row(
    row: Mapping[str, Any], default_id: str, scoring: Scoring | None = None
) -> FolderTask:
    """A task in the row form; `default_id` names it where its template has no `id:` line."""
    inputs: dict[str, bytes] = {}
    reward: dict[str, bytes] = {}
    for item in row.get("input_files") or []:
        try:
            name, content = str(item["file_path"]), str(item["content"]).encode()
        except (KeyError, TypeError) as error:
            raise TaskError(f"{default_id}: an input file needs file_path and content") from error
        if name.startswith("reward/"):
            short = name.removeprefix("reward/")
            reward["check.py" if short == "test.py" else short] = content
        else:
            inputs[name] = content
    metadata = {"category": "", "grading_type": "automated"}
    if row.get("rule"):
        metadata["rule"] = row["rule"]
    return FolderTask(
        task_id=_id_in(str(row.get("origin_template") or "")) or default_id,
        instruction=checked_text(row.get("prompt"), default_id, "prompt"),
        inputs=inputs or None,
        reward=reward or None,
        metadata=metadata,
        score=scoring or Scoring(),
    )


def _read_entry(path: Path) -> Mapping[str, Any]:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(entry, dict):
        raise TaskError(f"{path}: expected a JSON object, got {type(entry).__name__}")
    return entry


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _id_in(template: str) -> str:
    for line in template.splitlines():
        if line.strip().startswith("id:"):
            return line.strip().removeprefix("id:").strip()
    return ""

"""A task in ClawGym's folder form, on disk or in memory.

    task_NNNN/
      data_entry.json    {"task_id", "user_query", "metadata", "input_mount_dir"}
      input_files/**     copied to the mount before the agent starts
      reward/**          check.py and reward.sh, copied in only after the agent has ended

Not here: reading data sets (`clawgym.py`), making tasks up (`toy.py`), scoring (`grading.py`).
Invariant: `fill` never writes a grader's file, and never outside the workspace.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym_jax.core.errors import TaskError
from clawgym_jax.core.interfaces import SandboxFactory
from clawgym_jax.core.types import Grade
from clawgym_jax.tasks import grading

Files = Path | Mapping[str, bytes]  # a folder, or relative path -> content

DEFAULT_MOUNT = "/root/.openclaw/workspace"


@dataclass(frozen=True)
class FolderTask:
    """One problem; `inputs` and `reward` are None where the task has none."""

    task_id: str
    instruction: str
    mount: str = DEFAULT_MOUNT
    inputs: Files | None = None
    reward: Files | None = None
    folders: tuple[str, ...] = ()  # empty folders of the initial workspace
    metadata: Mapping[str, Any] = field(default_factory=dict)
    score: grading.Scoring = field(default_factory=grading.Scoring)

    def fill(self, workspace_host: Path) -> None:
        for name in self.folders:
            inside(workspace_host, name).mkdir(parents=True, exist_ok=True)
        if self.inputs is not None:
            write_files(self.inputs, workspace_host)

    async def grade(self, workspace_host: Path, sandboxes: SandboxFactory) -> Grade:
        if self.reward is None:
            return Grade(None, f"{self.task_id} has no reward folder: nothing can grade it")
        reward = self.reward
        return await grading.grade(
            self.task_id,
            workspace_host,
            self.mount,
            lambda folder: write_files(reward, folder),
            sandboxes,
            self.score,
        )


def write_files(files: Files, target: Path) -> None:
    """Copies a folder's content, or writes a mapping, into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(files, Path):
        shutil.copytree(files, target, dirs_exist_ok=True)
        return
    for name, content in files.items():
        path = inside(target, name)
        if path.parent != target:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; refuses names that lead out of it."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise TaskError(f"expected a path inside the workspace, got {name!r}: fix the task's files")
    return folder / pure


def write_folder(task: FolderTask, path: Path) -> None:
    """Writes `task` out as a ClawGym folder; empty folders get a .gitkeep."""
    path.mkdir(parents=True, exist_ok=True)
    entry = {
        "task_id": task.task_id,
        "user_query": task.instruction,
        "metadata": dict(task.metadata),
        "input_mount_dir": task.mount,
    }
    text = json.dumps(entry, indent=2, ensure_ascii=False) + "\n"
    (path / "data_entry.json").write_text(text, encoding="utf-8")
    if task.inputs is not None:
        write_files(task.inputs, path / "input_files")
    for name in task.folders:
        write_files({os.path.join(name, ".gitkeep"): b""}, path / "input_files")
    if task.reward is not None:
        write_files(task.reward, path / "reward")

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
from clawgym_jax.core.interfaces import McpServer, SandboxFactory
from clawgym_jax.core.types import Grade
from clawgym_jax.tasks import grading

Files = Path | Mapping[str, bytes]  # a folder, or relative path -> content

DEFAULT_MOUNT = "/root/.openclaw/workspace"
SYSTEM_FOLDERS = frozenset("bin boot dev etc lib lib32 lib64 libx32 proc run sbin sys usr".split())


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
    servers: tuple[McpServer, ...] = ()  # extra tools, started inside the sandbox

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
        _check_folder(files)
        shutil.copytree(files, target, symlinks=True, dirs_exist_ok=True)
        return
    for name, content in files.items():
        path = inside(target, name)
        if path.parent != target:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _check_folder(folder: Path) -> None:
    """Refuses what no agent can be given: links that lead out of the folder, fifos, devices."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink():
            try:
                fine = path.resolve(strict=True).is_relative_to(root)
            except (OSError, RuntimeError):  # leads nowhere, or in a circle
                fine = False
        else:
            fine = path.is_file() or path.is_dir()
        if not fine:
            raise TaskError(
                f"{path}: expected a file, a folder or a link within {folder}, got "
                f"{'a link to ' + os.readlink(path) if path.is_symlink() else 'a special file'}; "
                "fix the task's files"
            )


def checked_mount(mount: object, where: object) -> str:
    """The path at which a task wants its workspace; not one that hides the sandbox's own files."""
    parts = PurePosixPath(mount).parts if isinstance(mount, str) else ()
    if len(parts) < 2 or parts[0] != "/" or ".." in parts or "\0" in str(mount):
        raise TaskError(f"{where}: expected an absolute path of a folder as mount, got {mount!r}")
    if parts[1] in SYSTEM_FOLDERS:
        raise TaskError(f"{where}: mount {mount!r} lies in a folder of the system; use another")
    return "/" + "/".join(parts[1:])


def checked_text(value: object, where: object, key: str) -> str:
    """A text that can be an argument of a program: not empty, no NUL, encodable."""
    if not isinstance(value, str) or not value:
        raise TaskError(f"{where}: {key!r} must be a text, got {value!r}")
    if "\0" in value or value != value.encode(errors="ignore").decode():
        raise TaskError(f"{where}: {key!r} holds a NUL or half a surrogate pair; fix the text")
    return value


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

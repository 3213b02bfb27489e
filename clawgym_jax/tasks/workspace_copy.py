"""Copies a workspace that a hostile program may have left, without following where it points.

Regular files, folders and symbolic links that stay inside the workspace are copied; links that
lead out of it or into the folder left out, and fifos, sockets and devices, are not.
Invariant: nothing outside the source is read, nothing outside the target is written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_BYTES = 1 << 30
MAX_ENTRIES = 100_000
MAX_LINKS = 40  # expansions on one path, as in the kernel


class WorkspaceTooLarge(Exception):
    """The agent left more than is worth copying."""


def copy_workspace(source: Path, target: Path, mount: str, without: str) -> None:
    """Copies `source` into the existing folder `target`, leaving out its top entry `without`.

    `mount` is where the workspace was seen inside the sandbox: absolute links below it are kept.
    """
    budget = _Budget()
    links: list[tuple[str, str]] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(source / folder) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if name == without:
                    continue
                budget.count()
                if entry.is_symlink():
                    links.append((name, os.readlink(entry.path)))
                elif entry.is_dir(follow_symlinks=False):
                    (target / name).mkdir(exist_ok=True)
                    if os.access(entry.path, os.R_OK | os.X_OK):
                        pending.append(name)
                elif entry.is_file(follow_symlinks=False):
                    budget.take(entry.stat(follow_symlinks=False).st_size)
                    _copy_file(entry.path, target / name)
    for name, points_to in links:
        end = _resolve(source, name, mount)
        if end is not None and end[:1] != [without]:
            os.symlink(points_to, target / name)


class _Budget:
    def __init__(self) -> None:
        self.bytes = MAX_BYTES
        self.entries = MAX_ENTRIES

    def count(self) -> None:
        self.entries -= 1
        if self.entries < 0:
            raise WorkspaceTooLarge(f"the workspace holds more than {MAX_ENTRIES} entries")

    def take(self, size_bytes: int) -> None:
        self.bytes -= size_bytes
        if self.bytes < 0:
            raise WorkspaceTooLarge(f"the workspace holds more than {MAX_BYTES} bytes")


def _copy_file(source: str, target: Path) -> None:
    try:
        shutil.copy2(source, target, follow_symlinks=False)
    except PermissionError:
        return  # the agent took its own permission away: the grader would not see it either


def _resolve(root: Path, name: str, mount: str) -> list[str] | None:
    """Where `name` ends, as parts below `root`, walking as the kernel would inside the sandbox.

    None when it leaves the workspace on the way, or expands too many links.
    """
    done: list[str] = []
    todo = name.split("/")[::-1]
    expansions = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return None
            done.pop()
            continue
        path = root.joinpath(*done, part)
        if not path.is_symlink():
            done.append(part)
            continue
        expansions += 1
        points_to = os.readlink(path)
        if expansions > MAX_LINKS:
            return None
        if os.path.isabs(points_to):
            if os.path.commonpath([mount, os.path.normpath(points_to)]) != mount:
                return None
            points_to, done = points_to[len(mount) :], []
        todo += points_to.split("/")[::-1]
    return done

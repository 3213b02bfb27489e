"""Copies a workspace that a hostile program may have left, without following where it points.

Regular files, folders and symbolic links that stay inside the workspace are copied; links that
lead out of it or into the folder left out, and fifos, sockets and devices, are not.
Invariant: nothing outside the source is read, nothing outside the target is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 256 << 20
MAX_ENTRIES = 100_000
MAX_LINKS = 40  # expansions on one path, as in the kernel
UNREACHABLE = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT}


class WorkspaceTooLarge(Exception):
    """The agent left more than is worth copying."""


def copy_workspace(source: Path, target: Path, mount: str, without: str) -> None:
    """Copies `source` into the existing folder `target`, leaving out its top entry `without`.

    `mount` is where the workspace was seen inside the sandbox: absolute links below it are kept.
    """
    budget = _Budget()
    links: list[str] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        for entry in _entries(source / folder):
            name = os.path.join(folder, entry.name)
            if name == without:
                continue
            budget.count()
            with _skipping():
                if entry.is_symlink():
                    links.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    (target / name).mkdir(exist_ok=True)
                    pending.append(name)
                elif entry.is_file(follow_symlinks=False):
                    budget.take(entry.stat(follow_symlinks=False).st_size)
                    shutil.copy2(entry.path, target / name, follow_symlinks=False)
    for name in links:
        with _skipping():
            end = _resolve(source, name, mount)
            if end is not None and end[:1] != [without]:
                os.symlink(os.readlink(source / name), target / name)


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


@contextlib.contextmanager
def _skipping() -> Iterator[None]:
    """Leaves out what the agent made unreachable, for a grader as for us."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNREACHABLE:
            raise


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with _skipping(), os.scandir(folder) as entries:
        return list(entries)
    return []


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
            below = _below(points_to, mount)
            if below is None:
                return None
            todo, done = todo + below[::-1], []
            continue
        todo += points_to.split("/")[::-1]
    return done


def _below(path: str, mount: str) -> list[str] | None:
    """The parts of an absolute path below `mount`, however it is written: //mount/./x is x."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    head = [part for part in mount.split("/") if part]
    return parts[len(head) :] if parts[: len(head)] == head else None

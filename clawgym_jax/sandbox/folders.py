"""Folders of sandboxes on the host: private, short, and owned by a run that is alive or dead.

    <base>/<owner>-<random>/<n>/work     a sandbox's workspace
    <base>/<owner>-<random>/<n>/home     its HOME

Not here: processes and containers. Invariant: `sweep` never removes a folder whose owner lives;
an owner is a pid together with its start time, so a re-used pid is not taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.errors import SandboxError


def default_base() -> Path:
    """One folder per user of this machine, in the temporary folder."""
    return Path(tempfile.gettempdir()) / f"clawgym-{os.getuid()}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat_line.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a run belongs to."""

    pid: int
    started: int  # clock ticks since boot
    boot: str  # the boot it was started in, 8 hex digits

    @staticmethod
    def current() -> Owner:
        started = start_ticks(os.getpid())
        assert started is not None, "this process is alive"
        return Owner(os.getpid(), started, boot_id())

    @staticmethod
    def parse(text: str) -> Owner:
        """Reverses `str`; raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+)-(\d+)-([0-9a-f]{8})", text)
        if found is None:
            raise ValueError(f"not an owner: {text!r}")
        return Owner(int(found[1]), int(found[2]), found[3])

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}-{self.boot}"

    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Folder:
    """One sandbox's two folders."""

    root: Path
    work: Path
    home: Path
    etc: Path  # shared by the run's sandboxes: files that are the same for all


class RunFolder:
    """The private folder of one factory; made on first use, removed with its last sandbox."""

    def __init__(self, base: Path | None = None, etc: Mapping[str, str] | None = None) -> None:
        self._etc = dict(etc or {})
        self.base = (base or default_base()).absolute()
        self._root: Path | None = None
        self._numbers = itertools.count()
        self._live = 0

    def create(self) -> Folder:
        """Folders of a new sandbox, both empty, nobody else may enter."""
        run = self._ensure()
        root = run / f"{next(self._numbers):x}"
        folder = Folder(root, root / "work", root / "home", run / "etc")
        try:
            for path in (folder.root, folder.work, folder.home):
                path.mkdir(mode=0o700)
        except OSError as error:
            remove_tree(root)
            raise SandboxError(f"cannot make {root}: {error}; is the disk full?") from error
        self._live += 1
        return folder

    async def remove(self, folder: Folder) -> None:
        """Removes a sandbox's folders, and the run's folder with the last of them."""
        await asyncio.to_thread(remove_tree, folder.root)
        self._live -= 1
        if self._live == 0 and self._root is not None:
            root, self._root = self._root, None
            remove_tree(root)

    def sweep(self) -> int:
        """Ends what dead runs left running, removes their folders; returns how many sandboxes."""
        removed = 0
        for run in _entries(self.base):
            owner = _owner_of(run)
            if owner is None or owner.alive():
                continue
            removed += sum(1 for entry in _entries(run) if entry.name != "etc")
            kill_starters(run)
            remove_tree(run)
        return removed

    def _ensure(self) -> Path:
        if self._root is None:
            _private(self.base)
            root = Path(tempfile.mkdtemp(prefix=f"{Owner.current()}-", dir=self.base))
            (root / "etc").mkdir()
            for name, text in self._etc.items():
                (root / "etc" / name).write_text(text)
            self._root = root
        return self._root


def kill_starters(run: Path) -> None:
    """Kills the bwrap processes that name a folder of the dead run `run` in their arguments.

    A bwrap whose parent was killed before it was ready to die with it waits for ever.
    """
    inside = f"{run}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if Path(os.fsdecode(arguments[0])).name == "bwrap" and any(
                argument.startswith(inside) for argument in arguments
            ):
                os.kill(int(process.name), signal.SIGKILL)


def remove_tree(path: Path) -> None:
    """Removes a folder whatever a hostile program made of it; links are not followed."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return
    # Folders without permissions, or nested deeper than Python recurses: let the tools do it.
    for tool in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*tool, "--", str(path)], check=False, capture_output=True)
    if os.path.lexists(path):
        raise SandboxError(f"cannot remove {path}: remove it by hand and look at its permissions")


def _private(base: Path) -> None:
    """Makes `base`, or checks that it is ours alone."""
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700, parents=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SandboxError(
            f"{base} must be a folder of user {os.getuid()} with mode 0700, got mode "
            f"{stat.S_IMODE(found.st_mode):o} of user {found.st_uid}: remove it or name another"
        )


def _owner_of(run: Path) -> Owner | None:
    """None for a folder that no run of ours made."""
    try:
        return Owner.parse(run.name.rpartition("-")[0])
    except ValueError:
        return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

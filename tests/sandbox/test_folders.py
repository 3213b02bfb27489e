"""Folders: private, swept only when their owner is dead; selection, bounds and limits."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_jax.core.errors import ConfigError, SandboxError
from clawgym_jax.core.interfaces import SandboxSpec
from clawgym_jax.sandbox import bubblewrap, engine
from clawgym_jax.sandbox.folders import Owner, RunFolder, remove_tree, start_ticks
from clawgym_jax.sandbox.process import ProcessSandboxes
from clawgym_jax.sandbox.select import make_sandboxes
from tests.sandbox.conftest import ENV, MakeFactory, spec


def test_an_owner_is_a_pid_with_its_start() -> None:
    me = Owner.current()
    assert me.alive() and Owner.parse(str(me)) == me
    assert not Owner(me.pid, me.started + 1, me.boot).alive()  # the pid was given to another
    assert not Owner(me.pid, me.started, "00000000").alive()  # before the last boot
    with pytest.raises(ValueError):
        Owner.parse("lost+found")


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None


def test_folders_are_private_and_go_with_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        folders = RunFolder(tmp_path / "base")
        one, two = folders.create(), folders.create()
        for path in (tmp_path / "base", one.root, one.work, one.home):
            assert path.stat().st_mode & 0o777 == 0o700
        assert len(str(one.work)) - len(str(tmp_path)) < 60
        await folders.remove(one)
        assert two.work.is_dir() and not one.root.exists()
        await folders.remove(two)
        assert list((tmp_path / "base").iterdir()) == []

    asyncio.run(main())


def test_a_base_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(SandboxError, match="mode 0700, got mode 755"):
        RunFolder(base).create()
    base.rmdir()
    base.symlink_to(tmp_path)
    with pytest.raises(SandboxError, match="must be a folder"):
        RunFolder(base).create()


def test_sweep_leaves_foreign_folders_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "notes").mkdir(parents=True)
    (base / "1-2-x-y").mkdir()
    dead = Owner(2**22 + 1, 5, Owner.current().boot)
    (base / f"{dead}-abc" / "0" / "work").mkdir(parents=True)
    assert RunFolder(base).sweep() == 1
    assert sorted(path.name for path in base.iterdir()) == ["1-2-x-y", "notes"]


def test_sweep_ends_a_bwrap_that_waits_for_a_dead_run(tmp_path: Path) -> None:
    """kill -9 at the wrong moment leaves one; told by its name and the dead run's folder."""
    base = tmp_path / "base"
    dead, live = Owner(2**22 + 1, 5, Owner.current().boot), Owner.current()
    fake = tmp_path / "bwrap"
    fake.symlink_to("/bin/sh")
    waiting = {}
    for name, owner, program in (
        ("dead", dead, fake), ("live", live, fake), ("other program", dead, "/bin/sh"),
    ):  # fmt: skip
        work = base / f"{owner}-abc" / "0" / "work"
        work.mkdir(parents=True, exist_ok=True)
        command = [str(program), "-c", "read line", "--bind", str(work), "/workspace"]
        waiting[name] = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert RunFolder(base).sweep() == 1
        assert waiting["dead"].wait(10) == -signal.SIGKILL
        assert waiting["live"].poll() is None and waiting["other program"].poll() is None
    finally:
        for process in waiting.values():
            process.kill()
            process.communicate()


def test_remove_tree_does_not_follow_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(kept)
    remove_tree(tmp_path / "gone")
    assert (kept / "file").exists() and not (tmp_path / "gone").exists()
    remove_tree(tmp_path / "gone")


def test_auto_is_bubblewrap_where_it_works_else_processes_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "not allowed")
    factory = make_sandboxes("auto", base=tmp_path / "base")
    assert factory.kind == "process"
    assert "not allowed" in capsys.readouterr().err
    with pytest.raises(SandboxError, match="not allowed"):
        make_sandboxes("bubblewrap")
    with pytest.raises(ConfigError, match="expected one of auto"):
        make_sandboxes("podman")


def test_at_most_so_many_live_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        factory = make_sandboxes("process", base=tmp_path / "base", max_live=2)
        one, two = [await factory.create(spec("process")) for _ in range(2)]
        third = asyncio.create_task(factory.create(spec("process")))
        await asyncio.sleep(0.05)
        assert not third.done()
        await one.close()
        await one.close()  # gives its slot back once
        sandbox = await asyncio.wait_for(third, 5)
        fourth = asyncio.create_task(factory.create(spec("process")))
        await asyncio.sleep(0.05)
        assert not fourth.done()
        fourth.cancel()
        await asyncio.gather(fourth, two.close(), sandbox.close(), return_exceptions=True)
        assert list((tmp_path / "base").iterdir()) == []

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
def test_memory_files_and_cores_are_limited(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        sandbox = await make(kind).create(SandboxSpec("r", "e", memory_bytes=256 << 20, pids=40))
        run = [*"python3 -I -S -c".split()]
        try:
            eats = await sandbox.run([*run, "x = bytearray(1 << 30)"], ENV, 20)
            assert eats.returncode == 1 and b"MemoryError" in eats.stderr
            writes = "f = open('f', 'wb'); f.truncate(2 << 30)"
            assert (await sandbox.run([*run, writes], ENV, 20)).returncode != 0
            shows = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE))"
            assert (await sandbox.run([*run, shows], ENV, 20)).stdout == b"(0, 0)\n"
        finally:
            await sandbox.close()

    assert resource.getrlimit(resource.RLIMIT_CORE)[1] != 1  # ours are as they were
    asyncio.run(main())


def test_a_run_that_cannot_start_is_an_error_and_leaks_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = await ProcessSandboxes(tmp_path / "base").create(spec("process"))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SandboxError, match="could not start"):
            await sandbox.run(["true"], ENV, 5, cwd=str(tmp_path / "nowhere"))
        assert len(os.listdir("/proc/self/fd")) == before
        await sandbox.close()

    asyncio.run(main())


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", tmp_path / "none.sock")
    assert engine.find(tmp_path) is None
    assert engine.stop(tmp_path / "none") is False
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert engine.find(tmp_path) == "tcp://127.0.0.1:1"

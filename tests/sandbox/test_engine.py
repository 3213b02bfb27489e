"""Our own Docker engine: starts once, survives a kill -9 of an earlier one, stops for good."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.sandbox import engine
from tests.conftest import require
from tests.sandbox.conftest import processes_with

pytestmark = pytest.mark.docker

START = "import sys; from pathlib import Path; from clawgym_jax.sandbox import engine; "
START += "print(engine.start(Path(sys.argv[1])))"


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: containerd's sockets lie deep below it."""
    with tempfile.TemporaryDirectory(prefix="cgj") as folder:
        yield Path(folder) / "engine"


def test_start_restart_and_stop(root: Path) -> None:
    found = shutil.which("dockerd", path="/usr/bin:/usr/local/bin:/usr/sbin:/sbin")
    require(found is not None and os.getuid() == 0, "starting an engine needs dockerd and root")
    address = f"unix://{root}/docker.sock"
    try:
        command = [sys.executable, "-c", START, str(root)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as two,
        ):
            assert {one.communicate()[0], two.communicate()[0]} == {f"{address}\n"}
        engines = [line for line in processes_with(f"{root}/data") if "dockerd" in line]
        assert len(engines) == 1 and engine.answers(root / "docker.sock")
        os.kill(int((root / "dockerd.pid").read_text()), signal.SIGKILL)
        assert engine.start(root) == address and engine.answers(root / "docker.sock")
        assert engine.stop(root) is True
        assert processes_with(str(root)) == [] and not engine.answers(root / "docker.sock")
        assert str(root) not in Path("/proc/self/mountinfo").read_text()
        assert engine.stop(root) is False
    finally:
        engine.stop(root)


def test_without_dockerd_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(SandboxError, match=r"docker\.io"):
        engine.start(tmp_path)


def test_a_root_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **options: "/usr/sbin/dockerd")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(SandboxError, match="shorter path"):
        engine.start(tmp_path / ("x" * 100))

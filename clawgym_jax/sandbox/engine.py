"""Finds a Docker engine that answers, or starts our own with everything under one folder.

    python -m clawgym_jax.sandbox.engine start|stop|status [ROOT]

For machines without systemd and for CI. A user's own engine (DOCKER_HOST, the default socket) is
preferred and never touched. Not here: the Docker SDK; the engine is asked over plain HTTP.
Invariant: `start` twice at once gives one engine (a lock on ROOT); `stop` returns after its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from clawgym_jax.core.errors import SandboxError

DEFAULT_SOCKET = Path("/var/run/docker.sock")
LONGEST_SOCKET = "exec/containerd/containerd.sock.ttrpc"
MAX_SOCKET_PATH_BYTES = 107
START_S = 60.0
STOP_S = 30.0


def default_root() -> Path:
    """Where our own engine keeps its socket, images and log: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "clawgym" / "engine"


def socket_of(root: Path) -> Path:
    return root / "docker.sock"


def find(root: Path | None = None) -> str | None:
    """The address of an engine that answers: DOCKER_HOST, the default socket, then our own."""
    named = os.environ.get("DOCKER_HOST")
    if named:
        return named
    for path in (DEFAULT_SOCKET, socket_of(root or default_root())):
        if answers(path):
            return f"unix://{path}"
    return None


def answers(path: Path, timeout_s: float = 5.0) -> bool:
    """Whether GET /_ping on this unix socket says OK."""
    connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(str(path))
        connection.request("GET", "/_ping")
        return connection.getresponse().read() == b"OK"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def start(root: Path | None = None) -> str:
    """Starts our own engine unless it runs already; returns its address once it answers."""
    root = (root or default_root()).absolute()
    address = f"unix://{socket_of(root)}"
    dockerd = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if dockerd is None or os.getuid() != 0:
        raise SandboxError(
            "our own Docker engine needs dockerd (package docker.io) and root; "
            "or set DOCKER_HOST to one that runs"
        )
    if len(os.fsencode(root / LONGEST_SOCKET)) > MAX_SOCKET_PATH_BYTES:
        raise SandboxError(f"{root} leaves no room for the engine's sockets: name a shorter path")
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        if answers(socket_of(root)):
            return address
        _clear_stale(root)
        log_path = root / "dockerd.log"
        with log_path.open("wb") as log:
            engine = subprocess.Popen(
                _command(dockerd, root),
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and engine.poll() is None:
            if answers(socket_of(root)):
                engine.returncode = 0  # it outlives us on purpose: no warning at our exit
                return address
            time.sleep(0.1)
        ended = engine.poll() is not None
        if not ended:
            engine.kill()
            engine.wait()
    tail = log_path.read_text(errors="replace").strip().splitlines()[-3:]
    raise SandboxError(
        f"dockerd {'ended' if ended else f'did not answer within {START_S:g} s'}; "
        f"the end of {log_path}: {' | '.join(tail)}"
    )


def stop(root: Path | None = None) -> bool:
    """Stops our own engine and its containers' keepers; False when it was not running."""
    root = (root or default_root()).absolute()
    if not root.is_dir():
        return False
    with _locked(root):
        pid = _engine_pid(root)
        if pid is None:
            return False
        watch = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGTERM)
            if not _ends(watch, STOP_S):
                os.kill(pid, signal.SIGKILL)
                _ends(watch, STOP_S)
        finally:
            os.close(watch)
        _clear_stale(root)
        _unmount(root)
    return True


def _command(dockerd: str, root: Path) -> list[str]:
    return [
        dockerd,
        "--host", f"unix://{socket_of(root)}",
        "--data-root", str(root / "data"),
        "--exec-root", str(root / "exec"),
        "--pidfile", str(root / "dockerd.pid"),
        "--storage-driver", "overlay2",
        "--exec-opt", "native.cgroupdriver=cgroupfs",
        "--bridge=none", "--iptables=false", "--ip-forward=false",  # no sandbox has a network
        "--live-restore",
        "--log-level", "warn",
    ]  # fmt: skip


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _engine_pid(root: Path) -> int | None:
    """The process id of our dockerd, if it is one that works on this root."""
    try:
        pid = int((root / "dockerd.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if str(root / "data").encode() in command else None


def _clear_stale(root: Path) -> None:
    """Removes what a killed engine left, which would keep the next one from starting."""
    if _engine_pid(root) is not None:
        return
    for name in ("dockerd.pid", "docker.sock", "exec/containerd/containerd.pid"):
        (root / name).unlink(missing_ok=True)


def _unmount(root: Path) -> None:
    """Takes away the mounts that engines which were killed left on our folder, newest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    for point in reversed([p for p in points if Path(p).is_relative_to(root)]):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


def _ends(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def main(argv: list[str]) -> int:
    verb = argv[0] if argv else "status"
    root = Path(argv[1]) if len(argv) > 1 else None
    if verb == "start":
        print(start(root))
    elif verb == "stop":
        print("stopped" if stop(root) else "was not running")
    elif verb == "status":
        print(find(root) or "no engine answers")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Sandboxes by bubblewrap: unprivileged namespaces, no network but the proxy's socket.

Every run is a bwrap of its own over the same two folders: new user, pid, ipc, uts, cgroup and
network namespaces, a read-only root with nothing of the host but /usr, a few files of /etc and
the running Python; the workspace and HOME are the only places on disk that can be written.
Programs reach the proxy through `programs/forward.py` inside, which passes 127.0.0.1:PORT on to
the socket. Not here: limits on the whole sandbox (memory is limited per process), disk quotas.
Invariant: paths, hostname and user inside are the same for every sandbox.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, SandboxSpec
from clawgym_jax.sandbox.child import Child, uncancelled
from clawgym_jax.sandbox.folders import Folder, RunFolder
from clawgym_jax.sandbox.limits import exact_env, limited
from clawgym_jax.sandbox.local import OUTPUT_LIMIT_BYTES, PROGRAMS, LocalSandbox, socket_in
from clawgym_jax.sandbox.namespace import NamespaceInit

HOME = "/home/agent"
HOSTNAME = "sandbox"
UID = 1000
PORT = 8080  # on the sandbox's own loopback
SOCKET_DIR = "/run/proxy"
PROGRAMS_DIR = "/run/clawgym"
PYTHON_DIR = "/opt/python"
PACKAGES_DIR = "/opt/site-packages"
TMP_BYTES = 256 << 20
# Pid 1 of a run: its end is the end of every process in the namespace, and bwrap waits for it.
INIT = ("/bin/sh", "-c", '"$@"; exit $?', "init")
ETC = (
    "alternatives", "ca-certificates", "ld.so.cache", "localtime", "mime.types", "nsswitch.conf",
    "protocols", "services", "ssl/certs", "ssl/openssl.cnf",
)  # fmt: skip
ETC_OURS = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
}


class BubblewrapSandbox(LocalSandbox):
    """Kills a run by killing pid 1 of its namespace: it ends after the last process in it."""

    def __init__(
        self,
        spec: SandboxSpec,
        folders: RunFolder,
        folder: Folder,
        bwrap: str,
        output_limit_bytes: int,
    ) -> None:
        super().__init__(
            spec,
            folders,
            folder,
            workspace=spec.mount,
            home=HOME,
            base_url=f"http://127.0.0.1:{PORT}" if spec.endpoint_socket else "",
            output_limit_bytes=output_limit_bytes,
        )
        self._prefix = [bwrap, *_static_options(), *_own_options(spec, folder)]
        self._forward: list[str] = []
        if spec.endpoint_socket is not None:
            socket = f"{SOCKET_DIR}/{socket_in(spec.endpoint_socket).name}"
            forward = f"{PROGRAMS_DIR}/forward.py"
            self._forward = [inner_python(), "-I", "-S", forward, str(PORT), socket]

    async def start(
        self,
        argv: list[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str,
        stops: Sequence[asyncio.Event],
    ) -> ExecResult:
        program = limited(exact_env(argv, env), self.spec, processes=True)
        inside = [*INIT, *self._forward, *program]
        with NamespaceInit() as init:
            options = ["--info-fd", str(init.writer), "--chdir", cwd, "--"]
            child = Child(
                [*self._prefix, *options, *inside],
                env,
                "/",
                self.output_limit_bytes,
                pass_fds=[init.writer],
            )
            init.watch(child)
            return await child.wait(timeout_s, stops, kill=init.kill)


class BubblewrapSandboxes:
    """Makes bubblewrap sandboxes. Programs reach the proxy through its unix socket only."""

    kind = "bubblewrap"

    def __init__(
        self, base: Path | None = None, output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    ) -> None:
        problem = why_not()
        if problem:
            raise SandboxError(f"bubblewrap does not work here: {problem}")
        self._bwrap = _bwrap_path()
        self._folders = RunFolder(base, etc=ETC_OURS)
        self._output_limit_bytes = output_limit_bytes

    async def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        if spec.network_port is not None and spec.endpoint_socket is None:
            raise SandboxError(
                "a bubblewrap sandbox has no network: give endpoint_socket (the folder of the "
                f"proxy's unix socket), got only network_port={spec.network_port}"
            )
        folder = self._folders.create()
        try:
            return BubblewrapSandbox(
                spec, self._folders, folder, self._bwrap, self._output_limit_bytes
            )
        except BaseException:
            await uncancelled(self._folders.remove(folder))
            raise

    def sweep(self) -> int:
        return self._folders.sweep()


@cache
def why_not() -> str:
    """Why bubblewrap cannot be used on this machine; empty when it can. Really starts one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "no bwrap program on PATH; install the package bubblewrap"
    probe = [bwrap, *_static_options(), "--", inner_python(), "-I", "-S", "-c", "print('works')"]
    done = subprocess.run(
        probe, env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
    )
    if done.returncode == 0 and done.stdout == "works\n":
        return ""
    return (done.stderr.strip() or f"exit code {done.returncode}") + (
        "; are unprivileged user namespaces allowed, and is /proc not masked?"
    )


@cache
def inner_python() -> str:
    """The interpreter for our own programs, as seen inside."""
    if Path("/usr/bin/python3").exists():
        return "/usr/bin/python3"
    return f"{PYTHON_DIR}/bin/{Path(sys.executable).resolve().name}"


def _bwrap_path() -> str:
    found = shutil.which("bwrap")
    assert found is not None, "checked by why_not"
    return found


@cache
def _static_options() -> tuple[str, ...]:
    """What is the same for every sandbox on this machine."""
    options = [
        "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net",
        "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1",
        "--cap-drop", "ALL", "--disable-userns", "--uid", str(UID), "--gid", str(UID),
        "--hostname", HOSTNAME,
        "--ro-bind", "/usr", "/usr",
    ]  # fmt: skip
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        options += ["--ro-bind", sys.base_prefix, PYTHON_DIR]
    options += ["--ro-bind", sysconfig.get_path("purelib"), PACKAGES_DIR]
    options += ["--ro-bind", str(PROGRAMS), PROGRAMS_DIR]
    size = str(TMP_BYTES)
    options += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]
    options += ["--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp"]
    return tuple(options)


def _own_options(spec: SandboxSpec, folder: Folder) -> list[str]:
    """What differs between sandboxes: the folders behind the constant paths."""
    options: list[str] = []
    for name in ETC_OURS:
        options += ["--ro-bind", str(folder.etc / name), f"/etc/{name}"]
    if spec.endpoint_socket is not None:
        options += ["--ro-bind", str(spec.endpoint_socket), SOCKET_DIR]
    options += ["--bind", str(folder.home), HOME, "--bind", str(folder.work), spec.mount]
    return [*options, "--remount-ro", "/"]

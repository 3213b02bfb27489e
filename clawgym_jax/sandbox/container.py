"""The container of one sandbox: every option of its creation, and how a program is put into it.

Not here: the engine's SDK (`docker.py`). Invariant: no container has a network, a capability, a
way to new privileges or a writable root, and each carries its owner's labels.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym_jax.core.interfaces import SandboxSpec
from clawgym_jax.sandbox import recipes
from clawgym_jax.sandbox.folders import Folder, Owner
from clawgym_jax.sandbox.limits import exact_env
from clawgym_jax.sandbox.local import PROGRAMS, socket_in

HOME = "/home/agent"
HOSTNAME = "sandbox"
PORT = 8080  # on the container's own loopback
SOCKET_DIR = "/run/proxy"
PROGRAMS_DIR = "/run/clawgym"
KEEPER_UID = 65534
TMP_BYTES = 256 << 20
GRACE_S = 5  # how much later than ours the container's own timeout strikes
LABEL = "clawgym"
# Ends with the program, then takes with it whatever the program left behind.
WRAPPER = '/usr/bin/timeout -k 2 "$0" "$@"; code=$?; kill -9 -1; exit $code'
# What an exec has in its environment besides what it is given: the image's, runc's, the shell's.
ADDED_VARIABLES = ("PATH", "HOME", "HOSTNAME", "PWD", "SHLVL")


def host_label() -> str:
    """This machine, as labels name it: engines may serve several."""
    try:
        return Path("/etc/machine-id").read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def owner_labels() -> dict[str, str]:
    return {f"{LABEL}.host": host_label(), f"{LABEL}.owner": str(Owner.current())}


def options(spec: SandboxSpec, folder: Folder) -> dict[str, Any]:
    """Arguments of the SDK's `containers.create`."""
    name = spec.image or "base"
    keeper = ["sleep", "infinity"]
    mounts = [
        _bind(folder.work, spec.mount),
        _bind(folder.home, HOME),
    ]
    if spec.endpoint_socket is not None:
        found = socket_in(spec.endpoint_socket)
        _admit_keeper(spec.endpoint_socket, found)
        forward = f"{PROGRAMS_DIR}/forward.py"
        keeper = ["python3", "-I", "-S", forward, str(PORT), f"{SOCKET_DIR}/{found.name}"]
        mounts += [
            _bind(spec.endpoint_socket, SOCKET_DIR, read_only=True),
            _bind(PROGRAMS, PROGRAMS_DIR, read_only=True),
        ]
    return {
        "image": recipes.tag(name) if name in recipes.RECIPES else name,
        "command": keeper,
        "user": f"{KEEPER_UID}:{KEEPER_UID}",
        "hostname": HOSTNAME,
        "working_dir": "/",
        "mounts": mounts,
        "labels": {
            **owner_labels(),
            f"{LABEL}.run": spec.run_id,
            f"{LABEL}.episode": spec.episode_id,
        },
        "network_mode": "none",
        "read_only": True,
        "tmpfs": {"/tmp": f"size={TMP_BYTES},mode=1777"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": spec.pids,
        "mem_limit": spec.memory_bytes,
        "memswap_limit": spec.memory_bytes,
        "nano_cpus": int(spec.cpus * 1e9),
        "init": True,
        "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "log_config": {"Type": "none"},
    }


def wrapped(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> list[str]:
    """`argv` with exactly `env`, under a timeout that holds when we are gone."""
    limit = str(math.ceil(timeout_s + GRACE_S))
    return ["/bin/sh", "-c", WRAPPER, limit, *exact_env(argv, env, ADDED_VARIABLES)]


def _admit_keeper(folder: Path, endpoint: Path) -> None:
    """Lets the keeper, and as few others as possible, connect to the proxy's socket."""
    endpoint.chmod(0o666)
    if os.getuid() == 0:
        os.chown(folder, KEEPER_UID, -1)  # and its mode stays 0700
    else:
        folder.chmod(0o711)  # what is in the folder still needs an episode's key


def _bind(source: Path, target: str, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}

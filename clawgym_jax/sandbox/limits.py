"""What is put before a program in a sandbox without cgroups: its limits and its environment.

Memory, file size and number of processes are limited per process by `prlimit` (util-linux), what
our own starters added to the environment is taken out by `env`: one exec each, 1 ms, no hook in
our process. Not here: limits on a whole sandbox; only Docker has those (`docker.py`).
Invariant: a limit is never above the hard limit of this process, so setting it cannot fail.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from functools import cache

from clawgym_jax.core.interfaces import SandboxSpec

MAX_FILE_BYTES = 1 << 30


@cache
def prlimit_path() -> str | None:
    return shutil.which("prlimit", path="/usr/bin:/bin:/usr/local/bin")


def limited(argv: list[str], spec: SandboxSpec, processes: bool) -> list[str]:
    """`argv` under the limits of `spec`.

    `processes`: limit their number too. Only in a user namespace of its own, since elsewhere the
    kernel counts every process of the user against it.
    """
    tool = prlimit_path()
    if tool is None:
        return argv
    wanted = {
        "core": (resource.RLIMIT_CORE, 0),
        "data": (resource.RLIMIT_DATA, spec.memory_bytes),  # not AS: node reserves 100 GB of it
        "fsize": (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
    }
    if processes:
        wanted["nproc"] = (resource.RLIMIT_NPROC, spec.pids)
    options = [f"--{name}={_within(which, value)}" for name, (which, value) in wanted.items()]
    return [tool, *options, "--", *argv]


def exact_env(argv: list[str], env: Mapping[str, str]) -> list[str]:
    """`argv` with exactly `env`, given that it is started with `env` and a starter's additions.

    Bubblewrap sets PWD; Python in the C locale sets LC_CTYPE (PEP 538).
    """
    changes: list[str] = []
    for name in ("PWD", "LC_CTYPE"):
        changes = ["-u", name, *changes] if name not in env else [*changes, f"{name}={env[name]}"]
    return ["/usr/bin/env", *changes, *argv]


def _within(which: int, value: int) -> int:
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)

"""What is put before a program in a sandbox without cgroups: its limits and its environment.

Memory, file size and number of processes are limited per process by `prlimit` (util-linux), what
our own starters added to the environment is taken out by `env`: one exec each, 1 ms, no hook in
our process. Not here: limits on a whole sandbox; only Docker has those (`docker.py`).
Invariant: a limit is never above the hard limit of this process, so setting it cannot fail.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from functools import cache

from clawgym_jax.core.interfaces import SandboxSpec

MAX_FILE_BYTES = 1 << 30


@cache
def prlimit_path() -> str | None:
    return shutil.which("prlimit", path="/usr/bin:/bin:/usr/local/bin")


def limited(argv: list[str], spec: SandboxSpec, processes: bool) -> list[str]:
    """`argv` under the limits of `spec`.

    `processes`: limit their number too. Only in a user namespace of its own, since elsewhere (and
    before Linux 5.14 everywhere) the kernel counts every process of the user against it; and it
    never holds for root's own processes.
    """
    tool = prlimit_path()
    if tool is None:
        return argv
    wanted = {
        "core": (resource.RLIMIT_CORE, 0),
        "data": (resource.RLIMIT_DATA, spec.memory_bytes),  # not AS: node reserves 100 GB of it
        "fsize": (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
    }
    if processes and _kernel() >= (5, 14):
        wanted["nproc"] = (resource.RLIMIT_NPROC, spec.pids)
    options = [f"--{name}={_within(which, value)}" for name, (which, value) in wanted.items()]
    return [tool, *options, "--", *argv]


def exact_env(
    argv: Sequence[str], env: Mapping[str, str], added: Sequence[str] = ("PWD", "LC_CTYPE")
) -> list[str]:
    """`argv` with exactly `env`, when a starter that was given `env` has `added` to it.

    Bubblewrap sets PWD; Python in the C locale sets LC_CTYPE (PEP 538).
    """
    unset = [item for name in added if name not in env for item in ("-u", name)]
    reset = [f"{name}={env[name]}" for name in added if name in env]
    return ["/usr/bin/env", *unset, *reset, *argv]


@cache
def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _within(which: int, value: int) -> int:
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)

"""The way in: `make_sandboxes("auto" | "process" | "bubblewrap" | "docker")`.

auto = bubblewrap where it really works (one is started to find out), else plain processes with a
printed warning; Docker is never chosen for you, at 0.25 s a sandbox it is for those who name it.
Invariant: nothing of a kind that is not chosen is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import SandboxFactory
from clawgym_jax.sandbox.pool import BoundedSandboxes

KINDS = ("auto", "process", "bubblewrap", "docker")


def make_sandboxes(
    kind: str, *, base: Path | None = None, max_live: int | None = None
) -> SandboxFactory:
    """A factory of `kind`; at most `max_live` of its sandboxes exist at a time."""
    factory = _factory(_resolved(kind), base)
    return factory if max_live is None else BoundedSandboxes(factory, max_live)


def _resolved(kind: str) -> str:
    if kind not in KINDS:
        raise ConfigError(f"sandbox: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind != "auto":
        return kind
    from clawgym_jax.sandbox import bubblewrap

    problem = bubblewrap.why_not()
    if not problem:
        return "bubblewrap"
    print(
        f"warning: bubblewrap does not work here ({problem}); agent programs run as plain "
        "processes, which see this machine's files, processes and network",
        file=sys.stderr,
    )
    return "process"


def _factory(kind: str, base: Path | None) -> SandboxFactory:
    if kind == "process":
        from clawgym_jax.sandbox.process import ProcessSandboxes

        return ProcessSandboxes(base)
    if kind == "bubblewrap":
        from clawgym_jax.sandbox.bubblewrap import BubblewrapSandboxes

        return BubblewrapSandboxes(base)
    from clawgym_jax.sandbox.docker import DockerSandboxes

    return DockerSandboxes(base)

"""Scores a final workspace with a task's code grader, in a fresh sandbox of its own.

The agent's workspace is copied into a new sandbox, the grader's folder goes in last, and
`check.py` runs there on the copy. The score is what ClawGym's published reward.sh makes of the
JSON that check.py prints: the mean of float(v) over all values (its weighted "reward" included),
or the number itself; a check.py that fails, or prints what has no such mean, scores 0.
A grader that was killed, timed out or printed nothing gives no score: such a sample is excluded,
never a 0. Not here: rubric judges. Source: ClawGym I (arXiv 2604.26904), released RL data.
Invariant: nothing that the agent left can be imported by, replace, or point into the grader.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.errors import SandboxError, TaskError
from clawgym_jax.core.interfaces import ExecResult, SandboxFactory, SandboxSpec
from clawgym_jax.core.types import Grade
from clawgym_jax.tasks.workspace_copy import WorkspaceTooLarge, copy_workspace

REWARD_DIR = "reward"
KILLED_FROM = 126  # exit codes from here on: not executable, not found, killed by a signal
# Interpreters by preference: the trainer's own (process), the same one mounted (bubblewrap), any.
PATH = ":".join(
    (os.path.dirname(sys.executable), "/opt/python/bin", "/usr/local/bin", "/usr/bin", "/bin")
)


@dataclass(frozen=True)
class Scoring:
    """How check.py is run and what is made of its output."""

    timeout_s: float = 120.0
    reward_key_only: bool = False  # take the "reward" value alone where there is one
    isolated: bool = False  # python -I -S: for graders that import the standard library only


async def grade(
    task_id: str,
    workspace_host: Path,
    mount: str,
    put_reward: Callable[[Path], None],
    sandboxes: SandboxFactory,
    scoring: Scoring,
) -> Grade:
    """Never raises for what an agent did, or for a task that cannot be graded."""
    started_s = time.monotonic()
    spec = SandboxSpec(run_id="grading", episode_id=task_id, mount=mount)
    try:
        sandbox = await sandboxes.create(spec)
    except SandboxError as error:
        return Grade(None, f"no sandbox to grade in: {error}")
    try:
        await asyncio.to_thread(  # an agent may leave much behind; other episodes go on
            copy_workspace, workspace_host, sandbox.workspace_host, mount, without=REWARD_DIR
        )
        reward = sandbox.workspace_host / REWARD_DIR
        put_reward(reward)
        _shield_pytest(reward)
        if not (reward / "check.py").is_file():
            return Grade(None, f"{task_id}: expected reward/check.py, found none")
        result = await sandbox.run(
            _command(sandbox.workspace, scoring),
            _environment(sandbox.home),
            scoring.timeout_s,
            cwd=sandbox.home,  # an empty folder: `python -c` imports from where it stands
        )
    except WorkspaceTooLarge:
        return Grade(0.0, seconds=time.monotonic() - started_s)  # the agent's own doing
    except (SandboxError, TaskError, OSError) as error:
        return Grade(None, f"could not grade: {error}", seconds=time.monotonic() - started_s)
    finally:
        await sandbox.close()
    score, reason, checks = _judge(result, scoring)
    return Grade(score, reason, checks, time.monotonic() - started_s)


def _command(workspace: str, scoring: Scoring) -> list[str]:
    flags = ["-I", "-S"] if scoring.isolated else []
    return ["python3", *flags, f"{workspace}/{REWARD_DIR}/check.py", workspace]


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": PATH,
        "HOME": home,
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "/opt/site-packages",  # where bubblewrap mounts ours; read-only
    }


def _shield_pytest(reward: Path) -> None:
    """Makes reward/ pytest's root, so that a conftest.py or pytest.ini above it is not read."""
    if reward.is_dir() and not (reward / "pytest.ini").exists():
        (reward / "pytest.ini").write_bytes(b"")


def _judge(result: ExecResult, scoring: Scoring) -> tuple[float | None, str, Mapping[str, float]]:
    """(score, why there is none, checks) of a finished grader."""
    if result.timed_out:
        return None, f"the grader ran over {scoring.timeout_s:g} s", {}
    if result.returncode >= KILLED_FROM:
        return (
            None,
            f"the grader crashed with exit code {result.returncode}{_last_line(result)}",
            {},
        )
    if result.returncode != 0 and result.stderr.startswith(b"bwrap: "):
        return None, f"the grader's sandbox did not start{_last_line(result)}", {}
    if result.returncode != 0:
        return 0.0, "", {}
    if not result.stdout.strip():
        return None, f"the grader printed nothing{_last_line(result)}", {}
    score, checks = score_of(result.stdout, scoring.reward_key_only)
    return score, "", checks


def _last_line(result: ExecResult) -> str:
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""


def score_of(stdout: bytes, reward_key_only: bool = False) -> tuple[float, Mapping[str, float]]:
    """The score in [0, 1] of what a check.py printed, and its values by name.

    >>> score_of(b'{"exists": true, "right": 0.0, "reward": 0.2}')[0]
    0.39999999999999997
    """
    try:
        data = json.loads(stdout.decode("utf-8").strip())
        if isinstance(data, dict) and data:
            checks = {str(name): float(value) for name, value in data.items()}
        elif isinstance(data, int | float):
            checks = {"reward": float(data)}
        else:
            return 0.0, {}
    except (ValueError, TypeError, OverflowError, RecursionError):
        return 0.0, {}
    if reward_key_only and "reward" in checks:
        score = checks["reward"]
    else:
        score = sum(checks.values()) / len(checks)
    return (min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0), checks

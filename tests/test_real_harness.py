"""The real pi and Claude Code, end to end: tasks, calls, grades, an update, the next version.

Runs experiments/real_harness.py once for each program, as a user would, and holds what it printed
and what it logged to every clause of its claim. Claude Code trains with fewer tools and a short
system prompt here, both by its own flags; its full prompt of 47,000 tokens is served once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.types import CallRecord, Delivery, Episode, Outcome, Role
from clawgym_jax.rollout.store import EpisodeStore
from clawgym_jax.tree.filters import FilterConfig, select_calls
from tests.conftest import require

pytestmark = [pytest.mark.docker, pytest.mark.real_harness, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
OWN_TASK = {"pi": "error_lines", "claude_code": "paid_totals"}
SAMPLE_TASKS = ["task_0176", "task_0185", "task_1840"]
SOLVING = ("solve_by_files", "solve_by_shell")
FAILING = ("spoil", "stop_early")


@dataclass(frozen=True)
class Run:
    """What one run of the experiment left behind."""

    harness: str
    result: dict[str, Any]  # this harness's part of the last line
    store: EpisodeStore

    def episode(self, policy: str, step: int = 1) -> Episode:
        found = [e for e in self.store.of("train", step) if policy in e.record.episode_id]
        found = [e for e in found if OWN_TASK[self.harness] in e.record.episode_id]
        assert len(found) == 1, [e.record.episode_id for e in found]
        return found[0]


@pytest.fixture(scope="module", params=["pi", "claude_code"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    harness: str = request.param
    _require_images("base", {"pi": "pi", "claude_code": "claude-code"}[harness])
    folder = tmp_path_factory.mktemp(harness)
    command = [
        sys.executable,
        str(ROOT / "experiments" / "real_harness.py"),
        f"--harness={harness}",
        "--prompt=reduced",
        f"--workdir={folder / 'run'}",
        f"--tasks={ROOT / 'experiments' / 'real_harness_tasks' / OWN_TASK[harness]}",
        f"--drive_tasks={_sample_tasks(folder)}",
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout)
    result = json.loads(done.stdout.splitlines()[-1])["harness"][harness]
    return Run(harness, result, EpisodeStore(folder / "run" / harness))


def _require_images(*names: str) -> None:
    from clawgym_jax.sandbox import docker, recipes

    try:
        client = docker.connect()
    except SandboxError as error:
        require(False, str(error))
    for name in names:
        built = bool(client.images.list(name=recipes.tag(name)))
        require(built, f"image {name} is not built: python launch/images.py --images={name}")
    client.close()


def _sample_tasks(folder: Path) -> Path:
    """ClawGym's three sample tasks with our tests' graders in their place."""
    tasks = folder / "tasks"
    for name in SAMPLE_TASKS:
        shutil.copytree(ROOT / "tests" / "data" / "clawgym" / name, tasks / name)
        shutil.copytree(ROOT / "tests" / "tasks" / "graders" / name, tasks / name / "reward")
    return tasks


def _extends(first: CallRecord, second: CallRecord) -> bool:
    """The later prompt starts with the earlier prompt and what was sampled, id for id."""
    known = [*first.prompt_ids.tolist(), *first.completion.ids.tolist()]
    return second.prompt_ids.tolist()[: len(known)] == known


def test_every_call_is_recorded_and_spliced_id_for_id(run: Run) -> None:
    for policy in (*SOLVING, *FAILING):
        calls = run.episode(policy).calls
        assert len(calls) >= 2
        assert all(call.delivery is Delivery.DELIVERED for call in calls)
        for first, second in pairwise(calls):
            assert _extends(first, second)
            assert first.call_id in [span.call_id for span in second.spans]
    model = run.episode("model").calls
    assert model and all(0 < call.completion_tok <= 64 for call in model)


def test_calls_have_roles_and_trees_one_leaf(run: Run) -> None:
    for policy in (*SOLVING, *FAILING, "model"):
        calls = run.episode(policy).calls
        assert {(call.chain, call.role) for call in calls} == {("main", Role.MAIN)}
    for policy in SOLVING:
        selection = select_calls(run.episode(policy).calls, FilterConfig())
        assert selection.leaves == 1 and not selection.dropped


def test_the_tasks_own_grader_tells_good_from_bad(run: Run) -> None:
    for policy in SOLVING:
        episode = run.episode(policy)
        assert episode.record.outcome is Outcome.OK, episode.record.detail
        assert episode.reward == 1.0
        assert episode.record.grade.checks and episode.record.timings_s["grade"] > 0
    for policy in FAILING:
        assert run.episode(policy).record.outcome is Outcome.OK
        assert run.episode(policy).reward == 0.0
    assert run.episode("model").reward is not None


def test_the_update_lifts_successful_turns_and_lowers_failed_ones(run: Run) -> None:
    result = run.result
    assert result["logprob_gap_max"] < 1e-4
    assert result["grad_norm"] > 0
    assert result["rollouts"] == {"in the loss": 5}
    assert result["good_logprob_change"] > 0 > result["bad_logprob_change"]


def test_the_next_episode_is_served_by_the_new_weights(run: Run) -> None:
    assert run.result["versions"] == [1]
    assert run.result["next_versions"] == [2]
    again = run.episode("solve_by_files", step=2)
    assert again.reward == 1.0
    assert {int(v) for call in again.calls for v in call.completion.versions} == {2}
    change = run.result["replayed_logprob_change"]  # the engine's word for it, not the trainer's
    assert change["solve_by_files"] > 0


def test_clawgyms_sample_tasks_run_and_are_graded(run: Run) -> None:
    driven = run.result["driven"]
    assert [d["task"] for d in driven] == SAMPLE_TASKS
    assert all(d["outcome"] == "ok" and d["calls"] == 2 for d in driven)
    assert all(0 <= d["reward"] <= 1 for d in driven)
    assert driven[0]["reward"] == 0.75  # the stubs of task_0176 pass all checks but one


def test_sizes_are_stated(run: Run) -> None:
    result = run.result
    assert (result["tokenizer_size"], result["context_tok"]) == (1024, 65_536)
    assert result["first_prompt_tok"] == run.episode("solve_by_files").calls[0].prompt_tok
    assert result["row_tok"] >= result["first_prompt_tok"] > 2000
    assert result["rows"] == 1  # all rollouts share the system prompt in one row


def test_claude_codes_full_prompt_is_served_and_its_sub_agent_left_out(run: Run) -> None:
    if run.harness != "claude_code":
        assert "full_prompt" not in run.result  # pi has one prompt and no sub-agents
        return
    full = run.result["full_prompt"]
    assert full["first_prompt_tok"] > 40_000
    assert (full["outcome"], full["reward"]) == ("ok", 1.0)
    calls = run.episode("solve_by_subagent", step=2).calls
    first, *below, last = calls
    assert (first.chain, last.chain) == ("main", "main") and _extends(first, last)
    assert below and {call.role for call in below} == {Role.SUBAGENT}
    assert len({call.chain for call in below} - {"main"}) == 1
    dropped = select_calls(calls, FilterConfig()).dropped
    assert set(dropped.values()) == {"auxiliary call: sub-agent"} and len(dropped) == len(below)

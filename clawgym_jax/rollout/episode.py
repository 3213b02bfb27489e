"""One rollout: a harness program works on one task in one sandbox, seen only through the proxy.

    sandbox up -> files in -> episode opened -> program runs -> calls settle -> graded -> all gone

Not here: how many run at once (`scheduler`), what is trained (`batch`).
Invariant: whatever goes wrong, an Episode comes back, its outcome says what happened, and nothing
of its sandbox is left.
Source: ClawGym II, infrastructure (timeouts are graded and kept, failures of ours are discarded).
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import (
    Endpoint,
    ExecResult,
    Harness,
    LaunchPlan,
    Sampler,
    Sandbox,
    SandboxFactory,
    SandboxSpec,
    Task,
)
from clawgym_jax.core.types import Episode, EpisodeRecord, Grade, Outcome, SamplingParams
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.server import ProxyServer

STDERR_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Instance:
    """One rollout to do: which task through which harness, and its place in the run."""

    episode_id: str
    group_id: str
    task: Task
    harness: Harness
    split: str
    step: int
    seed: int


@dataclass(frozen=True)
class Limits:
    """Bounds of one episode. Defaults follow ClawGym I's released settings."""

    episode_s: float = 900.0
    window_tok: int = 65536
    max_tok: int = 8192  # per call
    memory_bytes: int = 2 << 30
    pids: int = 256


@dataclass(frozen=True, slots=True)
class Site:
    """Where rollouts happen: one proxy and one kind of sandbox."""

    run_id: str
    proxy: ProxyServer
    socket_dir: Path | None
    sandboxes: SandboxFactory
    limits: Limits
    session: str = ""  # differs per process, so that a rerun after a kill has call ids of its own


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.started_at_s = time.time()
        self._start = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self._start


async def run_episode(
    instance: Instance, site: Site, sampler: Sampler, sampling: SamplingParams, on_policy: bool
) -> Episode:
    """Never raises for what harness, model, task or sandbox do; only for cancellation."""
    clock = _Clock()
    sandbox: Sandbox | None = None
    trace: EpisodeTrace | None = None
    grade = Grade(None, "the episode did not get as far as grading")
    result: ExecResult | None = None
    failure = ""
    try:
        sandbox = await site.sandboxes.create(_sandbox_spec(instance, site))
        instance.task.fill(sandbox.workspace_host)
        clock.lap("sandbox")
        spec = _episode_spec(instance, site, sampler, sampling, on_policy)
        endpoint = site.proxy.open_episode(spec)
        try:
            result = await _run_program(instance, site, sandbox, endpoint)
            clock.lap("program")
        finally:
            trace = await site.proxy.close_episode(instance.episode_id)
            clock.lap("settle")
        failure = trace.failure
        if not failure:
            grade = await instance.task.grade(sandbox.workspace_host, site.sandboxes)
            clock.lap("grade")
    except Exception as error:  # whatever a task, a program or a sandbox does is data
        failure = f"{type(error).__name__}: {error}"
    finally:
        if sandbox is not None:
            await sandbox.close()
        clock.lap("sandbox")
    outcome, detail = _outcome(failure, result)
    return _episode(instance, site, clock, trace, grade, outcome, detail)


async def _run_program(
    instance: Instance, site: Site, sandbox: Sandbox, endpoint: Endpoint
) -> ExecResult:
    inside = dataclasses.replace(
        endpoint, base_url=endpoint.base_url.replace(site.proxy.origin, sandbox.base_url, 1)
    )
    task = instance.task
    if task.servers and not instance.harness.mcp:
        raise ConfigError(
            f"task {task.task_id} brings MCP servers {[s.name for s in task.servers]}, and "
            f"{instance.harness.name} speaks no MCP: pair it with a harness that does"
        )
    plan = instance.harness.launch(
        inside, task.instruction, sandbox.workspace, sandbox.home, task.servers
    )
    _write_home(sandbox.home_host, plan)
    failed = site.proxy.failure_event(instance.episode_id)
    return await sandbox.run(plan.argv, plan.env, site.limits.episode_s, stop=failed)


def _write_home(home: Path, plan: LaunchPlan) -> None:
    for name, content in plan.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _sandbox_spec(instance: Instance, site: Site) -> SandboxSpec:
    return SandboxSpec(
        run_id=site.run_id,
        episode_id=instance.episode_id,
        image=instance.harness.image,
        endpoint_socket=site.socket_dir,
        network_port=site.proxy.port,
        memory_bytes=site.limits.memory_bytes,
        pids=site.limits.pids,
        mount=instance.task.mount,
    )


def _episode_spec(
    instance: Instance, site: Site, sampler: Sampler, sampling: SamplingParams, on_policy: bool
) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=instance.episode_id,
        harness=instance.harness,
        sampler=sampler,
        sampling=sampling,
        window_tok=site.limits.window_tok,
        max_tok=site.limits.max_tok,
        seed=instance.seed,
        on_policy=on_policy,
        call_prefix=f"{instance.episode_id}.{site.session}" if site.session else "",
    )


def _outcome(failure: str, result: ExecResult | None) -> tuple[Outcome, str]:
    if failure or result is None:
        return Outcome.INFRASTRUCTURE, failure or "the program was not started"
    if result.timed_out:
        return Outcome.TIMEOUT, f"killed after {result.seconds:.1f} s"
    if result.returncode != 0:
        said = result.stderr[-STDERR_SHOWN:].decode(errors="replace").strip()
        return Outcome.HARNESS_ERROR, f"exit code {result.returncode}: {said}"
    return Outcome.OK, ""


def _episode(
    instance: Instance,
    site: Site,
    clock: _Clock,
    trace: EpisodeTrace | None,
    grade: Grade,
    outcome: Outcome,
    detail: str,
) -> Episode:
    calls = trace.calls if trace else ()
    timings = dict(clock.seconds)
    timings["model"] = trace.model_s if trace else 0.0
    timings["proxy"] = trace.overhead_s if trace else 0.0
    timings["total"] = clock.total()
    record = EpisodeRecord(
        run_id=site.run_id,
        episode_id=instance.episode_id,
        group_id=instance.group_id,
        task_id=instance.task.task_id,
        harness=instance.harness.name,
        split=instance.split,
        step=instance.step,
        seed=instance.seed,
        outcome=outcome,
        detail=detail,
        grade=grade,
        call_ids=tuple(call.call_id for call in calls),
        timings_s=timings,
        started_at_s=clock.started_at_s,
    )
    return Episode(record, tuple(calls))

"""The circle: demonstrations -> cold start -> evaluate -> (rollouts -> update -> publish)*.

With PPO the first steps can train the value model only (its pretraining).

Every stage can be interrupted and resumes where it was: finished episodes are in the log, the
state of training is in the latest checkpoint, results of finished stages in progress.json.
Not here: what the parts are (`assemble` chooses them).
Invariants: a step's plan depends on (seed, step) only; weights are published before the next
step's first rollout; a step is checkpointed after its metrics are written.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym_jax.core.errors import ClawgymError, ConfigError, RecordError
from clawgym_jax.core.interfaces import Harness, Sampler, Task, WeightSink
from clawgym_jax.core.types import Episode, SamplingParams
from clawgym_jax.rollout.episode import Instance
from clawgym_jax.rollout.group import plan_each, plan_step
from clawgym_jax.train.learner import Learner, ReinforceConfig
from clawgym_jax.train.metrics import MetricsWriter
from clawgym_jax.train.progress import Display, scores_line, step_line
from clawgym_jax.train.reinforce import reinforce
from clawgym_jax.train.run_folder import RunFolder
from clawgym_jax.train.run_states import COLD, TRAIN, RunStates
from clawgym_jax.train.sft import ColdStartConfig, train_supervised
from clawgym_jax.train.sources import EpisodeSource
from clawgym_jax.train.state import RunState, TrainState, init_state
from clawgym_jax.train.step import TrainStep

DEMO = "demo"
BASE_VERSION, COLD_VERSION = 1, 2  # of the weights; step k is rolled out by COLD_VERSION + k
OUT_OF_BUSINESS = 0.5  # share of failed episodes in a step at which the run stops with an error


@dataclass(frozen=True)
class LoopConfig:
    """How long, how wide. Defaults: ClawGym II's mix-harness setting."""

    steps: int = 200
    instances: int = 32  # (task, harness) pairs per step
    group_size: int = 8
    temperature: float = 0.7
    checkpoint_every: int = 1
    cold_checkpoint_every: int = 50
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)

    def __post_init__(self) -> None:
        names = ("instances", "group_size", "checkpoint_every", "cold_checkpoint_every")
        least = min(getattr(self, name) for name in names)
        if least < 1 or self.steps < 0 or self.temperature <= 0:
            wanted = f"steps >= 0, {' >= 1, '.join(names)} >= 1, temperature > 0"
            raise ConfigError(f"loop: expected {wanted}; got {self}")


@dataclass(frozen=True)
class Parts:
    """What the loop is made of."""

    source: EpisodeSource
    policy: Sampler
    demonstrator: Sampler | None
    sink: WeightSink
    cold_programs: TrainStep
    cold_optimizer: Any
    learner: Learner
    base: Callable[[], Any]  # reads the parameters to start from, placed on the training mesh
    shapes: Any  # theirs, with shardings on a mesh
    demo_tasks: Sequence[Task]
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    harnesses: Sequence[Harness]
    summarise: Callable[[Sequence[Episode]], dict[str, dict[str, Any]]]  # harness -> score


class Loop:
    """One run. `execute` returns the held-out results before and after."""

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder,
        config: LoopConfig,
        cold: ColdStartConfig,
        seed: int,
        heldout_temperature: float,
        display: Display,
    ) -> None:
        self._parts = parts
        self._folder = folder
        self._config = config
        self._cold = cold
        self._seed = seed
        self._heldout = SamplingParams(temperature=heldout_temperature)
        self._display = display
        self._states = RunStates(
            folder.path, parts.learner, parts.cold_optimizer, cold.updates, parts.shapes
        )
        self._reference: Any = None  # parameters that a KL penalty pulls towards
        self._metrics = MetricsWriter(folder.path)

    def execute(self) -> tuple[dict[str, Any], RunState]:
        """Runs what is not done yet. Returns (progress, final state)."""
        if self._folder.progress.get("done"):
            self._display.say("this run is finished already; another --workdir starts a new one")
            return self._folder.progress, self._finished()
        start_s = time.perf_counter()
        try:
            state = self._stages()
            self._folder.note(done=True)
        finally:  # an interrupted session counts, too
            spent_s = self._folder.progress.get("seconds", 0.0) + time.perf_counter() - start_s
            self._folder.note(seconds=spent_s, peak_memory_bytes=self._peak_memory_bytes())
        return self._folder.progress, state

    def _peak_memory_bytes(self) -> int:
        """The most that this process had resident, over all sessions of the run."""
        now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        return max(now, int(self._folder.progress.get("peak_memory_bytes", 0)))

    def _stages(self) -> RunState:
        state, done = self._resumed(TRAIN, self._states.training()) or self._begin()
        if self._parts.learner.wants_reference:
            self._reference = self._states.reference()
        self._publish(state.policy.params, self._version(done))
        self._folder.note(steps=self._all_steps)
        self._evaluate("before")
        for step in range(done, self._all_steps):
            state = self._step(state, step)
        self._evaluate("after")
        self._states.wait()
        return state

    def close(self) -> None:
        """Keeps what was saved; may be called after an interrupt."""
        self._states.close()
        self._metrics.close()

    # --- where the run stands ------------------------------------------------------------------

    @property
    def _all_steps(self) -> int:
        """Steps that train the value model only, then the others."""
        return self._parts.learner.pretrain_steps + self._config.steps

    def _version(self, done: int) -> int:
        """Of the weights after so many steps."""
        return COLD_VERSION + max(0, done - self._parts.learner.pretrain_steps)

    def _begin(self) -> tuple[RunState, int]:
        """The state before the first step, saved. What the cold start had beside it is gone."""
        state = self._parts.learner.begin(self._cold_start())
        if self._parts.learner.wants_reference:
            self._states.save_reference(state.policy.params)
        self._states.save(state, TRAIN, 0)
        return state, 0

    def _resumed(self, stage: str, found: tuple[Any, int] | None) -> tuple[Any, int] | None:
        if found is not None:
            self._display.say(f"resuming from {stage} update {found[1]}")
        return found

    def _finished(self) -> RunState:
        """The last state, and no other: who asks writes it over the run's model."""
        found = self._states.training()
        if found is None or found[1] != self._all_steps:
            gone = f"this run is finished, but the checkpoint of step {self._all_steps} is gone"
            raise RecordError(f"{self._folder.path}: {gone}; model/ and report stay as they are")
        return found[0]

    def _publish(self, params: Any, version: int) -> None:
        """Versions are a function of where the run stands: resumed or not, a step has its own."""
        self._parts.sink.publish(params, version)

    # --- stages --------------------------------------------------------------------------------

    def _cold_start(self) -> Any:
        """The parameters behind it; the base model's without one."""
        if not self._cold.updates or self._parts.demonstrator is None:
            return self._parts.base()
        episodes = self._demonstrations(self._parts.demonstrator)
        state, done = self._cold_state()
        with self._display.bar("cold start", self._cold.updates, done) as advance:

            def on_update(update: int, state: TrainState, metrics: dict[str, float]) -> None:
                advance()
                self._metrics.write("cold", update, metrics)
                if update % self._config.cold_checkpoint_every == 0 and update < self._cold.updates:
                    self._states.save(RunState(state), COLD, update)
                    self._display.say(f"cold start {update:4d}  nll {metrics['nll']:.3f}")

            return train_supervised(
                state, self._parts.cold_programs, episodes, self._parts.learner.batch, self._cold,
                self._seed, on_update, start=done,
            ).params  # fmt: skip

    def _cold_state(self) -> tuple[TrainState, int]:
        """Where the cold start stands: its state, and how many updates are done."""
        found = self._resumed(COLD, self._states.cold())
        if found is None:
            learner, optimizer = self._parts.learner, self._parts.cold_optimizer
            found = init_state(self._parts.base(), optimizer, learner.parallel), 0
        return found

    def _demonstrations(self, demonstrator: Sampler) -> list[Episode]:
        """Scored by the base model, which no one needs any more then."""
        self._publish(self._parts.base(), BASE_VERSION)
        plan = plan_each(
            self._parts.demo_tasks, self._parts.harnesses, split=DEMO, step=0, seed=self._seed
        )
        episodes = self._collect(
            "demonstrations", plan, demonstrator, SamplingParams(), on_policy=False
        )
        scores = self._parts.summarise(episodes)
        self._folder.note(demonstrator=scores)
        self._display.say(f"demonstrator, pass@1: {scores_line(scores)}")
        return episodes

    def _step(self, state: RunState, step: int) -> RunState:
        begin_s = time.perf_counter()
        value_only = step < self._parts.learner.pretrain_steps
        self._parts.source.usage()  # what was spent until here belongs to no step
        plan = plan_step(
            self._parts.train_tasks, self._parts.harnesses, split=TRAIN, step=step, seed=self._seed,
            instances=self._config.instances, group_size=self._config.group_size,
        )  # fmt: skip
        sampling = SamplingParams(temperature=self._config.temperature)
        title = f"step {step + 1}/{self._all_steps}"
        episodes = self._collect(title, plan, self._parts.policy, sampling, on_policy=True)
        rollout_s = time.perf_counter() - begin_s
        state, metrics = reinforce(
            state, self._parts.learner, episodes, self._seed * 100_003 + step,
            self._reference, value_only,
        )  # fmt: skip
        publish_s = time.perf_counter()
        if not value_only:
            self._publish(state.policy.params, self._version(step + 1))
        metrics["publish_s"] = time.perf_counter() - publish_s
        metrics |= {"rollout_s": rollout_s, **self._parts.source.usage()}
        metrics["step_s"] = time.perf_counter() - begin_s
        self._metrics.write("train", step + 1, metrics)
        if (step + 1) % self._config.checkpoint_every == 0 or step + 1 == self._all_steps:
            self._states.save(state, TRAIN, step + 1)
        self._display.say(step_line(step + 1, self._all_steps, metrics))
        return state

    def _evaluate(self, when: str) -> None:
        """Held-out pass@1 per harness, into progress.json under `when`."""
        if when in self._folder.progress or not self._parts.heldout_tasks:
            return
        plan = plan_each(
            self._parts.heldout_tasks,
            self._parts.harnesses,
            split=f"heldout-{when}",
            step=0,
            seed=self._seed,
        )
        episodes = self._collect(
            f"held-out {when}", plan, self._parts.policy, self._heldout, on_policy=False
        )
        scores = self._parts.summarise(episodes)
        self._folder.note(**{when: scores})
        self._display.say(f"held-out pass@1 {when}: {scores_line(scores)}")

    def _collect(
        self,
        title: str,
        plan: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        on_policy: bool,
    ) -> list[Episode]:
        with self._display.bar(title, len(plan)) as advance:
            episodes = self._parts.source.collect(
                plan, sampler, sampling, on_policy, lambda _: advance()
            )
        failed = [e.record for e in episodes if e.reward is None]
        if len(failed) > OUT_OF_BUSINESS * len(episodes):
            raise ClawgymError(
                f"{title}: {len(failed)} of {len(episodes)} episodes gave no reward; the first: "
                f"{failed[0].outcome}: {failed[0].detail or failed[0].grade.reason}"
            )
        return episodes

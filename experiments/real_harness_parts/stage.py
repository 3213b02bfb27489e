"""Where real harness programs play: one engine, one proxy, containers, and a log of every call.

Rollouts go one after another, so that an engine with few slots computes a long system prompt once
per weight version and copies it to the next rollout. Not here: policies, training.
Invariant: every episode that `perform` returns is in the run folder's logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym_jax.core.interfaces import Harness, Sampler, Task
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Episode, SamplingParams
from clawgym_jax.model import hf_weights, qwen3
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.rollout.episode import Instance, Limits
from clawgym_jax.rollout.scheduler import RolloutConfig, RolloutHost
from clawgym_jax.rollout.scripted import Policy, ScriptedSampler
from clawgym_jax.rollout.store import CALLS, EPISODES
from clawgym_jax.sandbox.select import make_sandboxes
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver

WINDOW_TOK = 65_536
ENGINE = EngineConfig(
    slots=3,
    window_tok=WINDOW_TOK,
    prefill_batch=1,
    prefill_chunks=(64, 512),
    kv_buckets=(4096, 8192, 24_576),
)
EPISODE_S = 1800.0  # a 47,000-token prompt is a minute's work for two busy cores
SCRIPTED_TOK = 1024  # longest scripted turn
SAMPLED_TOK = 64  # longest turn of the tiny model, which does not know when to end


@dataclass(frozen=True)
class Play:
    """One rollout to do: who speaks. Without a policy the model itself does."""

    name: str
    policy: Policy | None = None


@dataclass(frozen=True)
class Played:
    """A finished rollout and who spoke."""

    name: str
    task_id: str
    episode: Episode


class Stage:
    """Use as a context manager."""

    def __init__(self, model_folder: Path, workdir: Path) -> None:
        self.codec = ChatCodec.from_folder(model_folder)
        self.model, graphdef, self.params = hf_weights.read(model_folder)
        self.training_graph, _ = qwen3.abstract(self.model, remat="layers")
        self.tokenizer_size = self.model.vocab_size
        self._stack = contextlib.ExitStack()
        try:
            self._open(graphdef, workdir)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, graphdef: Any, workdir: Path) -> None:
        enter = self._stack.enter_context
        self.driver = enter(NativeDriver(Engine(graphdef, self.model, ENGINE), self.codec.decode))
        calls, episodes = enter(RecordLog(workdir / CALLS)), enter(RecordLog(workdir / EPISODES))
        sandboxes = make_sandboxes("docker")
        sandboxes.sweep()
        scripted, sampled = (
            enter(
                RolloutHost(
                    "real-harness",
                    self.codec,
                    calls,
                    episodes,
                    sandboxes,
                    RolloutConfig(
                        concurrency=1,
                        limits=Limits(episode_s=EPISODE_S, window_tok=WINDOW_TOK, max_tok=longest),
                    ),
                )
            )
            for longest in (SCRIPTED_TOK, SAMPLED_TOK)
        )
        self._scripted, self._sampled = scripted, sampled

    def perform(
        self, task: Task, harness: Harness, plays: Sequence[Play], step: int
    ) -> list[Played]:
        """One group: the rollouts of `task` through `harness`, in order."""
        return [
            Played(play.name, task.task_id, self._perform(task, harness, play, step, number))
            for number, play in enumerate(plays)
        ]

    def _perform(self, task: Task, harness: Harness, play: Play, step: int, number: int) -> Episode:
        sampler: Sampler = self.driver
        host = self._sampled
        if play.policy is not None:
            sampler, host = ScriptedSampler(play.policy, self.codec, self.driver), self._scripted
        instance = Instance(
            episode_id=f"{harness.name}-{task.task_id}-s{step}-{number}-{play.name}",
            group_id=f"s{step}/{harness.name}/{task.task_id}",
            task=task,
            harness=harness,
            split="train",
            step=step,
            seed=1000 * step + number,
        )
        return host.run([instance], sampler, SamplingParams(temperature=1.0))[0]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

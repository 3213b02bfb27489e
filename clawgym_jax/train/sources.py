"""Where the episodes of a plan come from: rolled out now, or read from a recorded run.

Not here: plans (`rollout.group`), what is learned from episodes (`reinforce`).
Invariant: episodes come back in the order of the plan, and none is rolled out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Sampler
from clawgym_jax.core.types import Episode, SamplingParams
from clawgym_jax.rollout.episode import Instance
from clawgym_jax.rollout.scheduler import RolloutHost
from clawgym_jax.rollout.store import EpisodeStore
from clawgym_jax.serving.metrics import UsageMeter


class EpisodeSource(Protocol):
    """Gives a plan's episodes."""

    def collect(
        self,
        plan: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        on_policy: bool,
        on_done: Callable[[Episode], None],
    ) -> list[Episode]: ...

    def usage(self) -> dict[str, float]:
        """Seconds and tokens since the last call, for the metrics."""
        ...


class LiveEpisodes:
    """Rolls out what the run's log does not hold yet."""

    def __init__(self, host: RolloutHost, store: EpisodeStore, meter: UsageMeter) -> None:
        self._host = host
        self._store = store
        self._meter = meter

    def collect(
        self,
        plan: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        on_policy: bool,
        on_done: Callable[[Episode], None],
    ) -> list[Episode]:
        done, todo = self._store.take(plan)
        for episode in done.values():
            on_done(episode)
        new = self._host.run(todo, sampler, sampling, on_policy=on_policy, on_done=on_done)
        done |= {episode.record.episode_id: episode for episode in new}
        return [done[instance.episode_id] for instance in plan]

    def usage(self) -> dict[str, float]:
        return self._meter.since_last()


SAME = ("seed", "harnesses", "tasks.kind", "tasks.train", "loop.instances", "loop.group_size")


def check_offline(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """ConfigError where a recorded run cannot have the episodes that a run would ask for.

    Both as they stand in a run folder's config.json.
    """
    wrong = [
        f"{name}={_field(config, name)} (recorded: {_field(recorded, name)})"
        for name in SAME
        if _field(config, name) != _field(recorded, name)
    ]
    demos = [_demonstrations(c) for c in (config, recorded)]
    if demos[0] > demos[1]:
        wrong.append(f"cold_start.demonstrations={demos[0]} (recorded: {demos[1]})")
    steps, most = _steps(config), _steps(recorded)
    if steps > most:
        pretrain = steps - int(_field(config, "loop.steps"))
        of = f", {pretrain} of them critic.pretrain_steps" if pretrain else ""
        wrong.append(f"{steps} steps{of} (recorded: {most}; set loop.steps={most - pretrain})")
    if wrong:
        raise ConfigError(f"--from_calls: the recorded run has other episodes: {'; '.join(wrong)}")


def _field(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value[part]
    return value


def _demonstrations(config: Mapping[str, Any]) -> int:
    cold = config["cold_start"]
    return int(cold["demonstrations"]) if cold["updates"] else 0


def _steps(config: Mapping[str, Any]) -> int:
    """With those that train the value model only."""
    ppo = config["batch"]["algorithm"] == "ppo"
    return int(config["loop"]["steps"]) + (int(config["critic"]["pretrain_steps"]) if ppo else 0)


class RecordedEpisodes:
    """Reads a recorded run's episodes instead of rolling out (--from_calls)."""

    def __init__(self, store: EpisodeStore) -> None:
        self._store = store

    def collect(
        self,
        plan: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        on_policy: bool,
        on_done: Callable[[Episode], None],
    ) -> list[Episode]:
        done, missing = self._store.take(plan)
        if missing:
            raise ConfigError(
                f"the recorded run lacks {len(missing)} of {len(plan)} episodes of this step, the "
                f"first {missing[0].episode_id}: it ended before, or rolled out something else; "
                "what has to agree is in docs/training.md, 'Offline'"
            )
        for episode in done.values():
            on_done(episode)
        return [done[instance.episode_id] for instance in plan]

    def usage(self) -> dict[str, float]:
        return {}

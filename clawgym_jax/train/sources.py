"""Where the episodes of a plan come from: rolled out now, or read from a recorded run.

Not here: plans (`rollout.group`), what is learned from episodes (`reinforce`).
Invariant: episodes come back in the order of the plan, and none is rolled out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
                f"first {missing[0].episode_id}: train with the configuration and the number of "
                "steps of the recorded run"
            )
        for episode in done.values():
            on_done(episode)
        return [done[instance.episode_id] for instance in plan]

    def usage(self) -> dict[str, float]:
        return {}

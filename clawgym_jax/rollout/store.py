"""Episodes of a run folder, read back with their calls.

For resuming (what was rolled out before a kill is used, not rolled out again) and for training
offline from a recorded run. Not here: writing (`scheduler` and the proxy do).
Invariant: an episode comes back with exactly the calls that its record names, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.log import read_log
from clawgym_jax.core.types import Episode, EpisodeRecord
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.rollout.episode import Instance

CALLS = "calls.log"
EPISODES = "episodes.log"


class EpisodeStore:
    """All settled episodes of a run, by id."""

    def __init__(self, folder: Path) -> None:
        """A folder without logs is an empty store."""
        records = [r for r in read_log(folder / EPISODES) if isinstance(r, EpisodeRecord)]
        calls = {call.call_id: call for call in read_calls(folder / CALLS)}  # logged before those
        self._episodes: dict[str, Episode] = {}
        for record in records:
            missing = [call_id for call_id in record.call_ids if call_id not in calls]
            if missing:
                raise RecordError(f"{folder}: episode {record.episode_id} lacks calls {missing}")
            found = tuple(calls[call_id] for call_id in record.call_ids)
            self._episodes[record.episode_id] = Episode(record, found)

    def __len__(self) -> int:
        return len(self._episodes)

    def of(self, split: str, step: int) -> list[Episode]:
        """The episodes of one step, in order of their ids."""
        found = [
            e for e in self._episodes.values() if (e.record.split, e.record.step) == (split, step)
        ]
        return sorted(found, key=lambda e: e.record.episode_id)

    def steps(self, split: str) -> list[int]:
        """The steps for which there are episodes, rising."""
        return sorted({e.record.step for e in self._episodes.values() if e.record.split == split})

    def take(self, plan: Sequence[Instance]) -> tuple[dict[str, Episode], list[Instance]]:
        """(episodes of the plan that are there, instances still to do)"""
        done = {i.episode_id: self._episodes[i.episode_id] for i in plan if self._has(i)}
        return done, [i for i in plan if i.episode_id not in done]

    def _has(self, instance: Instance) -> bool:
        episode = self._episodes.get(instance.episode_id)
        return episode is not None and episode.record.seed == instance.seed

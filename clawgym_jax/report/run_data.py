"""What a run folder holds, read without disturbing the run that may still be writing it.

Episodes are read before calls: a call is logged before the episode that names it, so the calls of
every episode that is seen are there. Only one episode's calls are kept in memory.
Not here: what is shown of it. Invariant: a file that is missing or half-written is no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clawgym_jax
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.log import read_log
from clawgym_jax.core.metrics_file import read_metrics
from clawgym_jax.core.types import CallRecord, Episode, EpisodeRecord, Role
from clawgym_jax.proxy.call_log import join_deliveries
from clawgym_jax.rollout.store import CALLS, EPISODES

_MANY_CALLS = 6  # more calls than this make an episode no better as an example


@dataclass(frozen=True)
class RunData:
    """A run, as far as it has come."""

    name: str  # of the folder
    config: Mapping[str, Any]
    progress: Mapping[str, Any]
    cold: tuple[dict[str, Any], ...]  # one line of metrics per update
    train: tuple[dict[str, Any], ...]  # one line of metrics per step
    episodes: tuple[EpisodeRecord, ...]
    calls: int
    example: Episode | None

    @property
    def harnesses(self) -> list[str]:
        """Names in the order of the configuration, then others as they appear."""
        configured = self.config.get("harnesses", [])
        return list(dict.fromkeys([*configured, *(e.harness for e in self.episodes)]))


@dataclass(slots=True)
class _Traits:
    """What makes an episode a good example."""

    calls: int = 0
    branches: int = 0


@dataclass(slots=True)
class _Census:
    calls: int = 0
    of: dict[str, _Traits] = field(default_factory=dict)


def load_run(folder: Path) -> RunData:
    """Raises ConfigError where there is no such folder."""
    require_folder(folder)
    metrics = read_metrics(folder)
    records = {r.episode_id: r for r in read_log(folder / EPISODES) if isinstance(r, EpisodeRecord)}
    episodes = tuple(records.values())
    census = _count(folder / CALLS)
    return RunData(
        name=folder.resolve().name,
        config=_json(folder / "config.json"),
        progress=_json(folder / "progress.json"),
        cold=tuple(line for line in metrics if line["stage"] == "cold"),
        train=tuple(line for line in metrics if line["stage"] == "train"),
        episodes=episodes,
        calls=census.calls,
        example=_example(folder / CALLS, episodes, census),
    )


def require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no run folder; expected the --workdir of a training run")


def find_codec(folder: Path) -> Path | None:
    """The tokenizer of a run: of its final model, or of the model that it started from."""
    start = str(_json(folder / "config.json").get("model", {}).get("path", ""))
    shipped = Path(clawgym_jax.__file__).parent / "data" / start
    for found in (folder / "model", shipped if start else None, Path(start) if start else None):
        if found is not None and (found / "tokenizer.json").is_file():
            return found
    return None


def read_calls_of(path: Path, episode_id: str) -> tuple[CallRecord, ...]:
    """The calls of one episode, by ordinal, without holding the others."""
    own: set[str] = set()

    def wanted(record: Any) -> bool:
        if isinstance(record, CallRecord):
            if record.episode_id == episode_id:
                own.add(record.call_id)
            return record.episode_id == episode_id
        return isinstance(record, dict) and record.get("call_id") in own

    calls = join_deliveries(record for record in read_log(path) if wanted(record))
    return tuple(sorted(calls, key=lambda call: call.ordinal))


def _count(path: Path) -> _Census:
    census = _Census()
    for record in read_log(path):
        if isinstance(record, CallRecord):
            census.calls += 1
            traits = census.of.setdefault(record.episode_id, _Traits())
            traits.calls += 1
            traits.branches += len(record.breaks) + (record.role is not Role.MAIN)
    return census


def _example(path: Path, episodes: tuple[EpisodeRecord, ...], census: _Census) -> Episode | None:
    """An episode worth looking at: with branches, several calls, late in training, rewarded."""

    def worth(record: EpisodeRecord) -> tuple[Any, ...]:
        traits = census.of.get(record.episode_id, _Traits())
        return (
            traits.branches > 0,
            traits.calls >= 3,
            record.split == "train",
            record.step,
            record.grade.score or 0.0,
            min(traits.calls, _MANY_CALLS),
            record.episode_id,
        )

    there = [
        r for r in episodes
        if r.call_ids and census.of.get(r.episode_id, _Traits()).calls >= len(r.call_ids)
    ]  # fmt: skip
    if not there:
        return None
    best = max(there, key=worth)
    calls = {call.call_id: call for call in read_calls_of(path, best.episode_id)}
    return Episode(best, tuple(calls[i] for i in best.call_ids if i in calls))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""A run's folder: where everything lies, where the run stands, and a text that explains it.

Not here: what the files contain. Invariant: `progress.json` is replaced whole, never half-written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.train.sources import check_offline

README = """\
This folder is one training run.

config.json     the configuration, every field
progress.json   which stages are done, and their results
run.lock        held by the process that works on this run
calls.log       every model call, token for token (msgpack frames; launch/report.py prints them)
episodes.log    every settled episode with its grade
metrics.jsonl   one line per step; after a resume the last line of a step counts
tensorboard/    the same numbers for TensorBoard
checkpoints/    orbax; the latest one is where a resume starts
reference/      the policy before its first step, where a KL penalty pulls towards it
model/          the final policy in Hugging Face form (when the run is done)
report.html     curves, outcomes, one prefix tree and one transcript

Steps count from 1; the episodes of step k are named s(k-1): s0000 is what step 1 learned from.

Resume: run the same command with the same --workdir.
Offline: launch/train.py with --from_calls=THIS_FOLDER trains from the log, without rollouts.
"""


LIMITS = {"loop.reinforce.max_logprob_gap"}  # what is refused, not what is computed


class RunFolder:
    """Paths and progress of one run."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "README.txt").write_text(README, encoding="utf-8")
        self._progress = self.path / "progress.json"
        self._config = json.dumps(config, indent=1, sort_keys=True, default=str)
        self._check_config(self.path / "config.json")

    def _check_config(self, target: Path) -> None:
        """A folder belongs to one configuration: resuming with another is an error."""
        if target.exists() and target.read_text(encoding="utf-8") != self._config:
            changed = _differences(_read_json(target), json.loads(self._config))
            if not set(changed) - LIMITS:
                return
            raise ConfigError(
                f"{self.path} was started with another configuration; changed: "
                f"{', '.join(changed[:5])}. Use the same flags, or another --workdir"
            )

    def check_recorded(self, recorded: Path) -> None:
        """ConfigError where that run's episodes are not those that this run would ask for."""
        if (recorded / "config.json").is_file():
            check_offline(json.loads(self._config), _read_json(recorded / "config.json"))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a process works on this run; a second one gets a ConfigError."""
        with (self.path / "run.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{self.path} is in use by another process; wait, or use another --workdir"
                ) from error
            yield

    def adopt(self) -> None:
        """From now on the folder belongs to this configuration (it was found to be usable)."""
        _replace(self.path / "config.json", self._config)

    @property
    def progress(self) -> dict[str, Any]:
        if not self._progress.exists():
            return {}
        return _read_json(self._progress)

    def note(self, **results: Any) -> None:
        """Adds to progress.json."""
        _replace(self._progress, json.dumps(self.progress | results, indent=1))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); restore it, or start a new --workdir"
        ) from error
    return found


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Dotted paths at which two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [d for k in keys for d in _differences(a.get(k), b.get(k), f"{at}.{k}".strip("."))]
    return [] if a == b else [at]

"""The states of a run on disk: the latest of each stage, and the policy before its first step.

A state is read into shapes that know their sharding: nothing is allocated but what is read.
Not here: files (`checkpoint`), what a stage does (`loop`).
Invariant: a checkpoint numbered below the cold start's updates is of the cold start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import optax

from clawgym_jax.train.checkpoint import Checkpoints
from clawgym_jax.train.learner import Learner
from clawgym_jax.train.state import RunState, TrainState, state_shapes

COLD, TRAIN = "cold", "train"


class RunStates:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        cold_optimizer: optax.GradientTransformation,
        cold_updates: int,
        shapes: Any,
    ) -> None:
        """cold_updates: of the whole cold start. shapes: of the policy's parameters."""
        self._reference = folder / "reference"
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self._learner = learner
        self._cold_optimizer = cold_optimizer
        self._cold_updates = cold_updates
        self._shapes = shapes

    def training(self) -> tuple[RunState, int] | None:
        """The state after the latest saved step and its number; None before training began."""
        latest = self._checkpoints.latest()
        if latest is None or latest < self._cold_updates:
            return None
        return self._restored(self._learner.shapes(self._shapes))

    def cold(self) -> tuple[TrainState, int] | None:
        """The same of the cold start, as long as there is nothing of training."""
        if self._checkpoints.latest() is None:
            return None
        shapes = state_shapes(self._shapes, self._cold_optimizer, self._learner.parallel)
        state, done = self._restored(RunState(shapes))
        return state.policy, done

    def save(self, state: RunState, stage: str, done: int) -> None:
        number = done if stage == COLD else self._cold_updates + done
        self._checkpoints.save(number, state, {"stage": stage, "done": done})

    def save_reference(self, params: Any) -> None:
        """Written once."""
        kept = Checkpoints(self._reference)
        if kept.latest() is None:
            kept.save(0, params, {})
        kept.close()

    def reference(self) -> Any:
        """What `save_reference` was given."""
        kept = Checkpoints(self._reference)
        shapes = self._learner.shapes(self._shapes).policy.params
        found, _ = kept.restore(shapes)
        kept.close()
        return _on_device(found)

    def wait(self) -> None:
        """Returns once everything saved is on disk."""
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    def _restored(self, shapes: RunState) -> tuple[RunState, int]:
        state, cursor = self._checkpoints.restore(shapes)
        return _on_device(state), int(cursor["done"])


def _on_device(tree: Any) -> Any:
    return jax.tree.map(jax.numpy.asarray, tree)

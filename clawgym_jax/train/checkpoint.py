"""Checkpoints by orbax: atomic folders, written in the background, restored bit for bit.

Leaves are stored under their tree path, so that a restore names what is missing instead of
guessing. Beside the arrays lies a small JSON cursor: where in the run this state stands.
Invariant: a checkpoint that `latest` returns was written completely.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from clawgym_jax.core.errors import RecordError


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """keep: how many of the latest to keep."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def save(self, step: int, state: Any, cursor: Mapping[str, Any]) -> None:
        """Starts writing; returns once the state may change again."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_flat(state)), cursor=ocp.args.JsonSave(dict(cursor))
            ),
        )

    def wait(self) -> None:
        """Returns once everything saved is on disk."""
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        step = self._manager.latest_step()
        return None if step is None else int(step)

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """(state, cursor) of a step, default the latest.

        `state` gives shapes and structure and, where it lies on a mesh, what goes to which chip.
        """
        at = self.latest() if step is None else step
        if at is None:
            raise RecordError(f"no checkpoint in {self._manager.directory}; start a new run there")
        flat = _flat(state)
        shapes = {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on_mesh(x))
            for key, x in flat.items()
        }
        try:
            found = self._manager.restore(
                at,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(shapes), cursor=ocp.args.JsonRestore()
                ),
            )
            leaves = [found["state"][key] for key in flat]
        except (
            KeyError,
            ValueError,
            OSError,
        ) as error:  # what orbax raises for lost or other files
            raise RecordError(
                f"checkpoint {self._manager.directory / str(at)} cannot be restored ({error}); it "
                "is damaged or of another model: remove that folder to go on from an earlier one"
            ) from error
        restored = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return restored, dict(found["cursor"])

    def close(self) -> None:
        self._manager.close()


def _on_mesh(leaf: Any) -> jax.sharding.NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def _flat(state: Any) -> dict[str, Any]:
    """Tree path -> leaf, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        for path, leaf in leaves
    }

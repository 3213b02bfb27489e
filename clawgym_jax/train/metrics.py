"""A run's numbers: one JSON line per step, and the same for TensorBoard.

Not here: reading them (`core.metrics_file`). Invariant: a value that JSON lacks is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from clawgym_jax.core.metrics_file import METRICS


class MetricsWriter:
    """Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """One line; numbers also go to TensorBoard under stage/name."""
        line = {"stage": stage, "step": step, **_finite(values)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._board.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such values become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }

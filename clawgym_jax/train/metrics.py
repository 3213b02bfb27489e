"""A run's numbers: one JSON line per step, and the same for TensorBoard.

Invariant: a line is written before the step's checkpoint, so a resumed run may repeat a step, and
the last line of a step counts (`read_metrics` does that).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

METRICS = "metrics.jsonl"


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
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines in order of (first appearance of the) step, repeated steps by their last line."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # a torn last line
        lines[line["stage"], line["step"]] = line
    return list(lines.values())


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such values become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }

"""The lines of metrics.jsonl, also while the run is writing them. Not here: writing them.

Invariant: a line is written before the step's checkpoint, so a resumed run may repeat a step; a
step counts by its last line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """In order of the step's first appearance; a torn last line is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines[line["stage"], line["step"]] = line
        except (ValueError, KeyError, TypeError):
            continue
    return list(lines.values())

"""Who takes part in the serving benchmark, whether answers agree, and which goals are met.

Invariant: a load is judged by itself, at the most requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NATIVE, JETSTREAM, PROCESS = "native", "jetstream", "jetstream_process"
HUGGING_FACE = {"huggingface": "", "huggingface-eager": "eager"}  # contestant -> experts
COUNTS = (1, 8, 32)
Row = dict[str, Any]


def agree(ids: list[list[list[int]]], native: list[list[list[int]]]) -> list[bool]:
    """Of each completion, whether it is native's."""
    return [
        a == b
        for theirs, ours in zip(ids, native, strict=True)
        for a, b in zip(theirs, ours, strict=True)
    ]


def goals(rows: list[Row]) -> Iterator[Row]:
    """native's seconds against theirs, at the most requests."""
    for load in dict.fromkeys(row["load"] for row in rows if row["part"] == "throughput"):
        ratio = {
            row["contestant"]: row["native_is_faster"]
            for row in rows
            if row.get("load") == load and row["requests"] == max(COUNTS)
        }
        at = f"at {max(COUNTS)} requests, {load}"
        for name in (JETSTREAM, PROCESS):
            if name in ratio:
                yield goal(f"native / {name} {at}", ratio[name], 1.3)
        if theirs := [ratio[name] for name in HUGGING_FACE if name in ratio]:
            yield goal(f"native / Hugging Face {at}", min(theirs), 5.0)


def goal(name: str, value: float, at_least: float) -> Row:
    return {"name": name, "value": value, "goal": f">= {at_least}", "ok": value >= at_least}

"""Reads calls back from a run's log, joined with what became of their answers.

A call is appended before its answer is sent; a small delivery frame follows. A call without such
a frame (the process was killed in between) counts as undelivered.
Invariant: calls come in the order in which they were recorded, each call id once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.log import read_log
from clawgym_jax.core.types import CallRecord, Delivery


def delivery_frame(call_id: str, delivery: Delivery, at_s: float) -> dict[str, Any]:
    return {"kind": "delivery", "call_id": call_id, "delivery": str(delivery), "at_s": at_s}


def join_deliveries(records: Iterable[Any]) -> list[CallRecord]:
    """Calls with their last known delivery. Records of other kinds are passed over."""
    calls: dict[str, CallRecord] = {}
    for record in records:
        if isinstance(record, CallRecord):
            if record.call_id in calls:
                raise RecordError(f"call {record.call_id} is in the log twice")
            calls[record.call_id] = record
        elif isinstance(record, dict) and record.get("kind") == "delivery":
            call = calls.get(record["call_id"])
            if call is None:
                raise RecordError(f"delivery of unknown call {record['call_id']!r}")
            delivery = Delivery(record["delivery"])
            calls[call.call_id] = dataclasses.replace(call, delivery=delivery)
    return list(calls.values())


def read_calls(path: Path) -> list[CallRecord]:
    """All calls of a log."""
    return join_deliveries(read_log(path))


def read_episodes(path: Path) -> Iterator[tuple[str, tuple[CallRecord, ...]]]:
    """(episode id, its calls by ordinal), in order of first appearance."""
    episodes: dict[str, list[CallRecord]] = {}
    for call in read_calls(path):
        episodes.setdefault(call.episode_id, []).append(call)
    for episode_id, calls in episodes.items():
        yield episode_id, tuple(sorted(calls, key=lambda call: call.ordinal))

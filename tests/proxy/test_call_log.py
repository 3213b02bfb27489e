"""Calls read back from the log of a run that was killed anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.log import RecordLog, read_log
from clawgym_jax.core.types import CallRecord, Delivery
from clawgym_jax.proxy.call_log import (
    delivery_frame,
    join_deliveries,
    read_calls,
    read_episodes,
)
from tests.proxy.support import stage

USER = {"role": "user", "content": "Do it."}


def recorded_bytes() -> bytes:
    async def run() -> bytes:
        async with stage("one", "two") as s:
            for _ in range(2):
                await s.chat([USER])
            return s.log_path.read_bytes()

    return asyncio.run(run())


def test_cut_at_every_byte_calls_are_a_prefix_and_never_delivered_by_accident(
    tmp_path: Path,
) -> None:
    data = recorded_bytes()
    path = tmp_path / "log"
    seen = set()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        frames = list(read_log(path))
        delivered = {f["call_id"] for f in frames if isinstance(f, dict)}
        calls = read_calls(path)
        assert [c.call_id for c in calls] == ["ep.0", "ep.1"][: len(calls)]
        for call in calls:
            known = call.call_id in delivered
            assert call.delivery is (Delivery.DELIVERED if known else Delivery.PENDING)
        seen.add((len(calls), len(delivered)))
    assert seen == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}


def test_faulty_logs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(recorded_bytes())
    (call, _) = read_calls(path)
    with pytest.raises(RecordError, match="twice"):
        join_deliveries([call, call])
    with pytest.raises(RecordError, match="unknown call"):
        join_deliveries([delivery_frame("nobody.0", Delivery.DELIVERED, 0.0)])


def test_episodes_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(recorded_bytes())
    with RecordLog(path) as log:
        log.append({"kind": "episode note"})
    ((episode_id, calls),) = read_episodes(path)
    assert episode_id == "ep"
    assert all(isinstance(call, CallRecord) for call in calls)
    assert [call.ordinal for call in calls] == [0, 1]

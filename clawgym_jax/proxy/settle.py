"""Waits until an episode's records are complete.

Settled: the number of records did not change over several checks and no sample is pending. A
harness can exit while its last request is still on its way, so one look is not enough.
Invariant: returns within `settle_timeout_s`. Source: ClawGym II, infrastructure (paper.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from clawgym_jax.proxy.config import ProxyConfig


async def settle(count: Callable[[], int], pending: Callable[[], int], config: ProxyConfig) -> bool:
    """Whether the records settled in time."""
    deadline_s = time.monotonic() + config.settle_timeout_s
    last = count()
    equal = 0
    while equal < config.settle_checks:
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(config.settle_interval_s)
        now = count()
        equal = equal + 1 if now == last and not pending() else 0
        last = now
    return True

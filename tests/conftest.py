"""Shared test set-up: hypothesis without deadlines (two busy cores), no silent skips in CI, and
processes that do not run out of memory maps."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=50)
settings.load_profile("default")


def require(condition: bool, why: str) -> None:
    """Skips where something is missing on a laptop; fails in CI (REQUIRE_ALL=1)."""
    if condition:
        return
    if os.environ.get("REQUIRE_ALL") == "1":
        pytest.fail(f"REQUIRE_ALL=1 and this cannot run: {why}")
    pytest.skip(why)


@pytest.fixture(autouse=True, scope="module")
def room_for_programs() -> Iterator[None]:
    """Every compiled program keeps memory maps, of which Linux allows a process 65,530 by default;
    the compiler aborts the process at the next. So tests forget old programs in time."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None and _maps() > 8_000:
        jax.clear_caches()
        gc.collect()


def _maps() -> int:
    try:
        return Path("/proc/self/maps").read_text().count("\n")
    except OSError:  # not Linux
        return 0

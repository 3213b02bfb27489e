"""Shared test set-up: hypothesis without deadlines (two busy cores), and no silent skips in CI."""

from __future__ import annotations

import os

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

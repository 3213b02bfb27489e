"""Sandboxes to grade in: plain processes, and bubblewrap where it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.interfaces import SandboxFactory
from clawgym_jax.sandbox import bubblewrap
from clawgym_jax.sandbox.process import ProcessSandboxes
from tests.conftest import require

DATA = Path(__file__).resolve().parents[1] / "data" / "clawgym"
GRADERS = Path(__file__).resolve().parent / "graders"


@pytest.fixture(params=["process", "bubblewrap"])
def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxFactory:
    if request.param == "process":
        return ProcessSandboxes(tmp_path / "base")
    require(not bubblewrap.why_not(), bubblewrap.why_not())
    return bubblewrap.BubblewrapSandboxes(tmp_path / "base")

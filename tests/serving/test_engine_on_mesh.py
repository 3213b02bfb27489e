"""The engine on several chips of a host gives the tokens and log-probs of one: 8 CPU devices."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1000)  # the first test waits for all meshes
MESHES = ("moe 1x2", "moe 2x2", "moe 4x2", "moe 8x1", "dense 1x2", "dense 2x2", "dense 1x2 int8")


@functools.cache
def measured() -> dict[str, dict[str, Any]]:
    """All meshes in one process: jax starts once."""
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.serving.mesh_worker", *MESHES],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {case["case"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", MESHES)
def test_tokens_and_logprobs_are_those_of_one_device(case: str) -> None:
    found = measured()[case]
    assert found["same_tokens"], found
    same = 2e-4 if "int8" in case else 1e-5  # an integer may be rounded the other way
    assert found["logprobs"] < same and found["scored"] < same
    assert found["prefilled_again"] == found["prefilled_again_alone"] < found["prompt_tok"]


@pytest.mark.parametrize("case", MESHES)
def test_a_chip_holds_its_share(case: str) -> None:
    """Keys and values over heads; matrices over the chips that the table names."""
    found = measured()[case]
    expert, tensor = (int(part) for part in case.split()[1].split("x"))
    assert found["kv_heads"] == 2 // tensor  # so have scales
    assert found["kinds"] == (2 if "int8" in case else 1)
    if case.startswith("moe"):
        assert found["experts"] == 8 // (expert * tensor)
    assert found["vocabulary"] == 64 // (expert * tensor)

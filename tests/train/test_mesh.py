"""The train step on a mesh equals the train step on one device, and the comparison has teeth.

Eight virtual CPU devices in one process, and two processes of four that talk over gloo; float32.
Tolerances, all relative: loss 1e-5, the gradient of every parameter 1e-4, weights and Adam's
moments after three updates 1e-4.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOSS, GRADIENT, STATE = 1e-5, 1e-4, 1e-4
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MOE = ("moe 2x4 all_gather", "moe 4x2 ragged", "moe 2x4 replay", "value moe 2x4")
DENSE = ("dense 4x2", "dense 8x1", "value dense 4x2")
TWO_PROCESSES = ("moe 1x8 ragged", "dense 2x4", "value dense 4x2")  # x lies over both; fsdp too
OTHERS = ("overflow", "empty rows", "serving", "checkpoint")
WRONG = (
    "no sum over replicas", "a token loses an expert",
    "other heads' keys", "each chip its own maximum",
)  # fmt: skip


def start(cases: tuple[str, ...], devices: int, *more: str) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_TO_COMPILE}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.train.mesh_worker", *cases, *more],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@functools.cache
def measured(cases: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """All cases of a kind in one process: jax starts once."""
    found = finish(start(cases, devices=8))
    assert all(case["devices"] == 8 for case in found)
    return {case["case"]: case for case in found}


def worst(distances: dict[str, float]) -> tuple[float, str]:
    return max((value, name) for name, value in distances.items())


def check(found: dict[str, Any]) -> None:
    assert found["loss"] < LOSS
    assert worst(found["gradients"]) < (GRADIENT, ""), worst(found["gradients"])
    if "state" in found:
        assert found["logprobs"] < 1e-5
        assert worst(found["state"]) < (STATE, ""), worst(found["state"])
        assert worst(found["metrics"]) < (1e-4, ""), worst(found["metrics"])


@pytest.mark.parametrize("case", MOE)
def test_a_mixture_trains_the_same(case: str) -> None:
    check(measured(MOE)[case])


@pytest.mark.parametrize("case", DENSE)
def test_a_dense_model_trains_the_same(case: str) -> None:
    check(measured(DENSE)[case])


def test_two_processes_train_the_same() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ("--of=2", f"--port={port}")
    both = [start(TWO_PROCESSES, 4, f"--process={i}", *more) for i in range(2)]
    try:
        found, nothing = (finish(process) for process in both)
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert [case["case"] for case in found] == list(TWO_PROCESSES) and not nothing
    for case in found:
        assert case["devices"] == 8
        check(case)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_programs_show(case: str) -> None:
    found = measured(WRONG)[case]
    off = max(found["loss"] / LOSS, worst(found["gradients"])[0] / GRADIENT)
    assert off > 10


def test_too_small_a_buffer_stops_the_step_before_it_changes_anything() -> None:
    found = measured(OTHERS)["overflow"]
    assert found["updates"] == 0
    assert len(found["said"]) == 2
    for text in found["said"]:
        assert "mesh.expert_buffer" in text and not text.startswith("0 rows")


def test_empty_rows_take_no_room_at_the_experts() -> None:
    """Else a step fails whose rows do not fill the last pass."""
    assert measured(OTHERS)["empty rows"]["said"] == {"all_gather": "nothing", "ragged": "nothing"}


def test_the_serving_table_serves_the_same_model() -> None:
    assert measured(OTHERS)["serving"]["logits"] < 1e-5


def test_a_sharded_state_is_restored_bit_for_bit() -> None:
    found = measured(OTHERS)["checkpoint"]
    assert found["equal"] and found["placed"]


def test_a_sharded_state_moves_to_another_mesh_bit_for_bit() -> None:
    found = measured(OTHERS)["checkpoint"]
    assert found["moved"] and found["moved_placed"]

"""launch/compile_check.py as a user runs it, on a small model, with the real compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawgym_jax.model import hf_config
from clawgym_jax.model.config import QWEN3_30B_A3B
from tests.conftest import require

ROOT = Path(__file__).resolve().parents[1]
SMALL = QWEN3_30B_A3B.replace(
    vocab_size=2048, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=4,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, intermediate_size=512,
)  # fmt: skip
SETTINGS = (
    "scale=paper", "engine.slots=4", "engine.window_tok=2048", "engine.prefill_chunks=256",
    "engine.decode_rows=1",
    "engine.kv_buckets=", "engine.room_slots=", "engine.room_tok=", "engine.cache_tok=2048",
    "batch.pack.row_tok=8192", "batch.pack.train_tok=2048",
    "model.micro_rows=2", "serving_mesh.expert=2", "serving_mesh.tensor=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def compiler() -> None:
    present = importlib.util.find_spec("libtpu") is not None
    require(present, "libtpu is not installed: pip install -e '.[test]' brings it")


def check(folder: Path, *arguments: str, topology: str = "v5e:2x4") -> Any:
    (folder / "config.json").write_text(json.dumps(hf_config.to_hf(SMALL)))
    settings = (*SETTINGS, f"model.path={folder}")
    return subprocess.run(
        [
            sys.executable, "launch/compile_check.py", "--experiment=experiments/mix_grpo.py",
            f"--topology={topology}", *(f"--override={s}" for s in settings), *arguments,
        ],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip


def paper(experiment: str, topology: str, *arguments: str) -> dict[str, Any]:
    """What a check of the 30B configuration of an experiment found."""
    done = subprocess.run(
        [
            sys.executable, "launch/compile_check.py", f"--experiment=experiments/{experiment}.py",
            "--override=scale=paper", f"--topology={topology}", *arguments,
        ],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def decode_flops(slots: int, window_tok: int) -> int:
    """Of one of four chips (expert 2, tensor 2): a token for every slot over a full window.

    A chip has half of the heads, and a quarter of the experts and of the vocabulary; with so few
    tokens every expert computes all of them.
    """
    m = SMALL
    q, kv = m.num_heads * m.head_dim // 2, m.num_kv_heads * m.head_dim // 2
    projections = m.hidden_size * (2 * q + 2 * kv)
    attention = 2 * q * window_tok
    experts = m.num_experts // 4 * 3 * m.hidden_size * m.moe_intermediate_size
    router = m.hidden_size * m.num_experts
    head = m.hidden_size * m.vocab_size // 4
    return 2 * slots * (m.num_layers * (projections + attention + experts + router) + head)


def test_apply_and_decode_compile_and_are_counted(tmp_path: Path) -> None:
    done = check(tmp_path, "--mesh=2,4", "--programs=apply,decode,decode_few")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mesh"] == {"fsdp": 2, "x": 4} and found["chips"] == 8
    assert found["programs"]["apply"]["flops"] == 0  # arithmetic, no products
    decode = found["programs"]["decode"]
    assert decode["flops"] == pytest.approx(decode_flops(slots=4, window_tok=2048), rel=0.01)
    assert decode["received_bytes"].keys() <= {"all-gather", "all-reduce"}
    assert 1 <= decode["hbm_bytes"] / found["decode_bytes"] < 3  # small: much is not weights
    assert "times that" in done.stdout
    few = found["programs"]["decode_few"]
    assert few["flops"] < decode["flops"] / 2  # products of one row may be no matrix products
    assert few["hbm_bytes"] < 0.6 * decode["hbm_bytes"]  # a copy of the slots would be above 1
    serving = found["resident_bytes"]["serving"]
    assert serving["serving copy, keys and values, working space"] == decode["peak_bytes"]
    assert [g["ok"] for g in found["goals"] if g["name"].startswith("serving")] == [True] * 2
    assert "GiB  bf16[" in done.stdout  # its buffers, by name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_step_compiles_and_is_near_its_ideal(tmp_path: Path) -> None:
    done = check(tmp_path, "--mesh=2,4", "--programs=old_logprobs,accumulate")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("old_logprobs", "accumulate"):
        program = found["programs"][name]
        assert 1.0 <= program["flops"] / program["ideal_flops"] < 1.6
    assert "live" in done.stdout and "estimate, not measured" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_paper_model_trains_and_serves_on_a_v5p_64() -> None:
    """All 48 layers of Qwen3-30B-A3B, every program; minutes on two cores."""
    found = paper("mix_grpo", "v5p:4x4x4")
    assert all(goal["ok"] for goal in found["goals"]), found["goals"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_paper_model_decodes_from_8_bit_keys_and_values() -> None:
    """They are read as they are: no copy in another type, and less to move than in bfloat16."""
    arguments = "--programs=decode,prefill", "--override=engine.cache_tok=0"
    plain, found = (
        paper("mix_grpo", "v5p:4x4x4", *arguments, f"--override=engine.kv_dtype={kind}")
        for kind in ("model", "int8")
    )
    tokens = 12 * 16_384 + 6 * 32_768 + 2 * 65_536  # of all slots; a chip has one KV head
    less = tokens * 48 * 2 * (2 * 128 - (128 + 4))
    assert plain["decode_bytes"] - found["decode_bytes"] == less
    for name in ("decode", "prefill"):
        one, other = plain["programs"][name], found["programs"][name]
        assert one["hbm_bytes"] - other["hbm_bytes"] > 0.9 * less
        assert one["peak_bytes"] - other["peak_bytes"] > less
    goals = {goal["name"]: goal["ok"] for goal in found["goals"]}
    assert goals["decode: bytes moved / bytes that must be read"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_paper_model_trains_with_a_value_model_on_a_v5p_64() -> None:
    """PPO: two models of 30B and their moments, beside the serving copy; minutes on two cores."""
    found = paper("mix_ppo", "v5p:4x4x4", "--programs=accumulate,value_accumulate,decode")
    assert found["experiment"] == "mix_ppo_paper" and len(found["resident_bytes"]["training"]) == 3
    goals = {goal["name"]: goal["ok"] for goal in found["goals"]}
    for name in ("accumulate", "value_accumulate"):
        program = found["programs"][name]
        assert program["peak_bytes"] < found["hbm_bytes"]
        assert program["flops"] >= program["ideal_flops"], "counted too low"
        assert goals[f"{name}: FLOPs / ideal"]
    assert goals["training: resident on a chip / its memory"]
    assert all(goals.values()), found["goals"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_paper_model_is_served_by_a_v6e_host_of_its_own() -> None:
    """Four chips of 32 GiB hold the 30B copy and 320K tokens of keys and values."""
    smaller = (
        "engine.slots=13", "engine.room_slots=8,4,1", "engine.cache_tok=0",
    )  # fmt: skip
    found = paper(
        "mix_grpo",
        "v6e:8x8",
        "--programs=decode,prefill",
        *(f"--override={setting}" for setting in smaller),
    )
    assert found["programs"]["decode"]["hbm_bytes"] >= found["decode_bytes"], "counted too low"
    goals = {goal["name"]: goal["ok"] for goal in found["goals"]}
    assert goals["decode: bytes moved / bytes that must be read"]
    assert goals["serving on chips of its own: resident on a chip / its memory"]


@pytest.mark.parametrize(
    ("arguments", "topology", "said"),
    [
        (("--mesh=2,4", "--programs=fly"), "v5e:2x4", "expected some of old_logprobs"),
        (("--mesh=4,4",), "v5e:2x4", "the 8 devices there are"),
        (("--mesh=8",), "v5e:2x4", "expected FSDP,X"),
        (("--mesh=2,4",), "v9:2x4", "expected CHIP:SHAPE"),
        (("--mesh=2,4",), "v5e:3x5", "knows no such topology"),
        (("--mesh=0,1",), "v5e:2x4", "give --mesh"),
    ],
)
def test_wrong_requests_say_what_was_expected(
    tmp_path: Path, arguments: tuple[str, ...], topology: str, said: str
) -> None:
    done = check(tmp_path, *arguments, topology=topology)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert said in done.stderr + done.stdout

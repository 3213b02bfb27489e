"""transformers itself loads what we write. Only where it is installed: CI has no torch."""

import pathlib
from typing import Any

import numpy as np
import pytest

from clawgym_jax.model import hf_weights
from clawgym_jax.model.config import Yarn
from tests.model import hf_cases

# Needs torch and transformers, which CI does not install: its fixtures are made with them instead.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def _theirs(folder: pathlib.Path) -> np.ndarray:
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info  # no missing, unexpected or mismatched keys
    with torch.no_grad():
        tokens = torch.tensor(hf_cases.reference("tokens"), dtype=torch.long)
        logits: np.ndarray = model.eval()(tokens).logits.numpy()
    return logits


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5_000])
@pytest.mark.parametrize("case", list(hf_cases.CASES))
def test_transformers_computes_the_same_from_our_files(
    tmp_path: pathlib.Path, case: str, max_shard_bytes: int
) -> None:
    config, _, params = hf_weights.read(hf_cases.folder_of(tmp_path, case))
    hf_weights.write(tmp_path / "ours", config, params, max_shard_bytes=max_shard_bytes)
    got = _theirs(tmp_path / "ours")
    np.testing.assert_allclose(got, hf_cases.reference(case), rtol=0, atol=hf_cases.TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"yarn": Yarn(8.0, 8, beta_fast=2.0, beta_slow=0.5, truncate=False)},  # 64 positions
        {"yarn": Yarn(2.0, 32, attention_factor=1.4)},
        {"rope_theta": 500.0, "num_experts_per_tok": 5, "rms_norm_eps": 1e-3},
    ],
)
def test_changed_configurations_agree(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    config, _, params = hf_weights.read(hf_cases.folder_of(tmp_path, "base"))
    hf_weights.write(tmp_path / "ours", config.replace(**changes), params)
    ours = hf_cases.logits_of(tmp_path / "ours", compiled=False)
    theirs = _theirs(tmp_path / "ours")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=hf_cases.TOLERANCE)

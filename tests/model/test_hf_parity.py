"""Logits equal to transformers' on committed fixtures, and a proof that each feature counts.

A feature that our code ignored would pass the parity test if it changed nothing; the second half
therefore flips each one and asks for logits that differ by a thousand tolerances.
"""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model import hf_weights
from tests.model import hf_cases
from tests.model.hf_cases import CASES, TOLERANCE


@pytest.mark.parametrize("case", list(CASES))
def test_logits_equal_those_of_transformers(tmp_path: pathlib.Path, case: str) -> None:
    got = hf_cases.logits_of(hf_cases.folder_of(tmp_path, case))
    np.testing.assert_allclose(got, hf_cases.reference(case), rtol=0, atol=TOLERANCE)


def test_the_fixtures_are_not_trivial() -> None:
    for case in CASES:
        logits = hf_cases.reference(case)
        assert 1 < np.max(np.abs(logits)) < 10 and np.std(logits) > 0.3, case


@pytest.mark.parametrize("case", ["theta_1e4", "yarn", "yarn_dense"])
def test_the_old_spelling_of_the_configuration_is_read(tmp_path: pathlib.Path, case: str) -> None:
    folder = hf_cases.folder_of(tmp_path, case)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if rope["rope_type"] != "default":
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    got = hf_cases.logits_of(folder, compiled=False)
    np.testing.assert_allclose(got, hf_cases.reference(case), rtol=0, atol=TOLERANCE)


def _yarn(**changes: Any) -> dict[str, Any]:
    """rope_parameters of the case `yarn`, changed; None removes a key."""
    rope = CASES["yarn"]["config"]["rope_parameters"] | changes
    return {"rope_parameters": {k: v for k, v in rope.items() if v is not None}}


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
FLIPS: list[tuple[str, dict[str, Any]]] = [
    ("base", {"norm_topk_prob": False}),
    ("no_norm_topk", {"norm_topk_prob": True}),
    ("base", {"tie_word_embeddings": True}),
    ("tied", {"tie_word_embeddings": False}),
    ("base", {"rope_parameters": DEFAULT_ROPE}),
    ("theta_1e4", {"rope_parameters": DEFAULT_ROPE | {"rope_theta": 1e6}}),
    ("base", {"num_experts_per_tok": 4}),
    ("top_4", {"num_experts_per_tok": 2}),
    ("top_4", {"num_experts_per_tok": 3}),
    ("sparse_step_2", {"decoder_sparse_step": 1}),
    ("sparse_step_2", {"decoder_sparse_step": 3}),
    ("base", {"decoder_sparse_step": 2}),
    ("mlp_only", {"mlp_only_layers": []}),
    ("mlp_only", {"mlp_only_layers": [0]}),
    ("base", {"mlp_only_layers": [1]}),
    ("base", {"rms_norm_eps": 1e-2}),
    ("dense", {"rms_norm_eps": 1e-2}),
    ("dense", {"rope_parameters": DEFAULT_ROPE}),
    ("dense", {"tie_word_embeddings": True}),
    ("yarn", {"rope_parameters": DEFAULT_ROPE}),
    ("yarn", _yarn(factor=2.0)),
    ("yarn", _yarn(original_max_position_embeddings=32)),
    ("yarn", _yarn(beta_slow=0.25)),
    ("yarn", _yarn(beta_fast=2.0)),
    ("yarn", _yarn(attention_factor=1.0)),
    ("yarn", _yarn(truncate=False)),
    ("yarn", _yarn(mscale=2.0, mscale_all_dim=0.5)),
    ("yarn_attention_factor", _yarn()),
    ("yarn_dense", _yarn()),
]


@pytest.mark.parametrize("case", list(CASES))
def test_tensors_of_other_cases_change_nothing(tmp_path: pathlib.Path, case: str) -> None:
    """So that below only the flip can be what moves the logits."""
    alone = hf_cases.logits_of(hf_cases.folder_of(tmp_path, case), compiled=False)
    whole = hf_cases.logits_of(hf_cases.folder_with_all_tensors(tmp_path, case), compiled=False)
    np.testing.assert_array_equal(whole, alone)


@pytest.mark.parametrize(("case", "flip"), FLIPS, ids=lambda x: x if isinstance(x, str) else "")
def test_flipping_any_feature_shows(
    tmp_path: pathlib.Path, case: str, flip: dict[str, Any]
) -> None:
    folder = hf_cases.folder_with_all_tensors(tmp_path, case, **flip)
    got = hf_cases.logits_of(folder, compiled=False)
    assert np.max(np.abs(got - hf_cases.reference(case))) > 1e3 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "flip"),
    [("sparse_step_2", {"decoder_sparse_step": 1}), ("base", {"mlp_only_layers": [1]})],
)
def test_weights_of_other_kinds_of_layers_are_refused(
    tmp_path: pathlib.Path, case: str, flip: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match="missing: "):
        hf_weights.read(hf_cases.folder_of(tmp_path, case, **flip))


def test_an_absent_head_dim_is_derived_as_the_mixture_class_does(tmp_path: pathlib.Path) -> None:
    folder = hf_cases.folder_of(tmp_path, "base")
    config = {k: v for k, v in CASES["base"]["config"].items() if k != "head_dim"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    got = hf_cases.logits_of(folder, compiled=False)
    np.testing.assert_allclose(got, hf_cases.reference("base"), rtol=0, atol=TOLERANCE)

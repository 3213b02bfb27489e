"""Parity with transformers on committed fixtures, and files that survive a round trip."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from clawgym_jax.model import attention, hf_weights, qwen3
from clawgym_jax.model import config as model_config

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CASES: dict[str, Any] = json.loads((FIXTURES / "configs.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5


def _folder(tmp_path: pathlib.Path, case: str, **changes: Any) -> pathlib.Path:
    """A model folder of the fixtures' weights, with the case's configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = FIXTURES / f"{CASES[case]['weights']}.safetensors"
    (folder / hf_weights.WEIGHTS).write_bytes(weights.read_bytes())
    (folder / "config.json").write_text(json.dumps(CASES[case]["config"] | changes))
    return folder


def _logits(folder: pathlib.Path) -> np.ndarray:
    _, graphdef, params = hf_weights.read(folder)
    tokens = jnp.asarray(_reference("tokens"))
    end = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return attention.dense_tree_attention(q, k, v, end), None

    out = qwen3.apply(graphdef, params, tokens, positions, attend)
    return np.asarray(qwen3.apply_logits(graphdef, params, out.hidden))


def _reference(name: str) -> np.ndarray:
    return safetensors.numpy.load_file(FIXTURES / "logits.safetensors")[name]


@pytest.mark.parametrize("case", list(CASES))
def test_logits_equal_those_of_transformers(tmp_path: pathlib.Path, case: str) -> None:
    got = _logits(_folder(tmp_path, case))
    np.testing.assert_allclose(got, _reference(case), atol=TOLERANCE)


def test_the_old_spelling_of_the_configuration_is_read(tmp_path: pathlib.Path) -> None:
    folder = _folder(tmp_path, "theta_1e4")
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(_logits(folder), _reference("theta_1e4"), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "breaking"),
    [
        ("base", {"norm_topk_prob": False}),
        ("base", {"num_experts_per_tok": 3}),
        ("base", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("base", {"tie_word_embeddings": True}),
        ("base", {"rms_norm_eps": 1e-1}),
    ],
)
def test_parity_has_teeth(tmp_path: pathlib.Path, case: str, breaking: dict[str, Any]) -> None:
    """Breaking any one feature moves the logits by thousands of tolerances."""
    got = _logits(_folder(tmp_path, case, **breaking))
    assert np.max(np.abs(got - _reference(case))) > 1e3 * TOLERANCE


@pytest.mark.parametrize("case", ["base", "tied", "sparse_step_2", "mlp_only", "dense"])
def test_written_files_are_the_read_ones(tmp_path: pathlib.Path, case: str) -> None:
    folder = _folder(tmp_path, case)
    config, _, params = hf_weights.read(folder)
    hf_weights.write(tmp_path / "again", config, params)
    before = safetensors.numpy.load_file(folder / hf_weights.WEIGHTS)
    after = safetensors.numpy.load_file(tmp_path / "again" / hf_weights.WEIGHTS)
    if config.tie_word_embeddings:
        before.pop("lm_head.weight")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert hf_weights.read_config(tmp_path / "again") == config


def test_weights_in_several_files_are_found(tmp_path: pathlib.Path) -> None:
    folder = _folder(tmp_path, "base")
    tensors = safetensors.numpy.load_file(folder / hf_weights.WEIGHTS)
    (folder / hf_weights.WEIGHTS).unlink()
    names = sorted(tensors)
    where: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1}-of-2.safetensors"
        safetensors.numpy.save_file({n: tensors[n] for n in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / hf_weights.INDEX).write_text(json.dumps({"weight_map": where}))
    np.testing.assert_allclose(_logits(folder), _reference("base"), atol=TOLERANCE)


def test_place_sees_every_parameter_once(tmp_path: pathlib.Path) -> None:
    seen: list[str] = []

    def place(path: str, array: np.ndarray) -> jax.Array:
        seen.append(path)
        return jnp.asarray(array)

    _, _, params = hf_weights.read(_folder(tmp_path, "mlp_only"), place=place)
    assert len(seen) == len(set(seen)) == len(jax.tree.leaves(params))


def test_param_dtype_can_be_chosen(tmp_path: pathlib.Path) -> None:
    folder = _folder(tmp_path, "base")
    config = hf_weights.read_config(folder).replace(param_dtype=jnp.bfloat16)
    _, _, params = hf_weights.read(folder, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_what_is_wrong_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors"):
        hf_weights.read(tmp_path, model_config.TINY)
    folder = _folder(tmp_path, "base", num_hidden_layers=4)
    with pytest.raises(KeyError, match=r"layers\.3"):
        hf_weights.read(folder)
    config = hf_weights.read_config(folder).replace(num_layers=3, vocab_size=33)
    with pytest.raises(ValueError, match="expected shape"):
        hf_weights.read(folder, config)

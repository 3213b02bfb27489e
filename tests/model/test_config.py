"""Sizes of the presets, kinds of layers, config.json of both generations, and what is refused."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_config, qwen3

# Published files, by the first generation of names. Only what has a meaning here is kept.
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_8b": COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3_32b": COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "qwen3_30b_a3b": COMMON
    | {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "router_aux_loss_coef": 0.001,
    },
}
TINY = hf_config.to_hf(model_config.TINY)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """The same file as the second generation writes it."""
    out = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
    rope = config["rope_scaling"] or {"rope_type": "default"}
    out["rope_parameters"] = rope | {"rope_theta": config["rope_theta"]}
    out["dtype"] = out.pop("torch_dtype")
    out["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if "num_experts" in out:
        out["num_local_experts"] = out.pop("num_experts")
    return out


def _comparable(config: model_config.Qwen3Config) -> model_config.Qwen3Config:
    """With dtypes that compare equal: jnp.float32 and dtype('float32') do not."""
    dtype = jnp.dtype(config.param_dtype)
    return config.replace(dtype=dtype, param_dtype=dtype)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_named_configurations_are_the_published_files(name: str) -> None:
    expected = _comparable(model_config.NAMED[name])
    assert hf_config.from_hf(PUBLISHED[name]) == expected
    assert hf_config.from_hf(_renamed(PUBLISHED[name])) == expected


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("tiny", 577_600, 356_416),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3_8b", 8_190_735_360, 8_190_735_360),
        ("qwen3_32b", 32_762_123_264, 32_762_123_264),
    ],
)
def test_number_of_parameters(name: str, total: int, active: int) -> None:
    config = model_config.NAMED[name]
    _, params = qwen3.abstract(config)
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)) == total
    assert config.num_parameters == total
    assert config.num_active_parameters == active


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_only_layers": (1,), "tie_word_embeddings": False},
        {"decoder_sparse_step": 2, "num_layers": 5},
        {"num_experts": 0, "num_experts_per_tok": 0},
    ],
)
def test_counts_follow_the_kinds_of_layers(changes: dict[str, Any]) -> None:
    config = model_config.TINY.replace(**changes)
    _, params = qwen3.abstract(config)
    sizes = {jax.tree_util.keystr(p): x.size for p, x in jax.tree.leaves_with_path(params)}
    assert config.num_parameters == sum(sizes.values())
    idle = config.num_experts - config.num_experts_per_tok
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    inactive = config.num_moe_layers * idle * expert
    assert config.num_active_parameters == config.num_parameters - inactive


def test_consecutive_layers_of_one_kind_are_one_segment() -> None:
    config = model_config.TINY.replace(num_layers=6, mlp_only_layers=(0, 3))
    assert config.segments == ((False, 1), (True, 2), (False, 1), (True, 2))
    assert config.num_moe_layers == 4
    stepped = model_config.TINY.replace(num_layers=4, decoder_sparse_step=2)
    assert [stepped.is_moe(i) for i in range(4)] == [False, True, False, True]
    assert model_config.QWEN3_8B.segments == ((False, 36),)


YARNS = st.builds(
    model_config.Yarn,
    factor=st.floats(1, 64),
    original_max_position_embeddings=st.integers(1, 2**20),
    beta_fast=st.floats(1, 64),
    beta_slow=st.floats(0.1, 8),
    attention_factor=st.none() | st.floats(0.1, 4),
    mscale=st.none() | st.floats(0.1, 4),
    mscale_all_dim=st.none() | st.floats(0.1, 4),
    truncate=st.booleans(),
)


@given(
    preset=st.sampled_from(list(model_config.NAMED.values())),
    yarn=st.none() | YARNS,
    theta=st.floats(1e3, 1e8),
    dense=st.lists(st.integers(0, 2), unique=True).map(tuple),
    step=st.integers(1, 3),
)
def test_hugging_face_spelling_round_trips(
    preset: model_config.Qwen3Config, yarn: Any, theta: float, dense: Any, step: int
) -> None:
    changes = {"mlp_only_layers": dense, "decoder_sparse_step": step} if preset.num_experts else {}
    config = _comparable(preset.replace(yarn=yarn, rope_theta=theta, **changes))
    text = json.dumps(hf_config.to_hf(config))  # what a file can hold
    assert hf_config.from_hf(json.loads(text)) == config


def test_both_generations_find_their_names() -> None:
    config = hf_config.to_hf(model_config.TINY.replace(yarn=model_config.Yarn(4.0, 256)))
    assert config["num_experts"] == config["num_local_experts"] == 8
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
    assert config["torch_dtype"] == config["dtype"] == "float32"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_from_either_key(key: str) -> None:
    config = {k: v for k, v in TINY.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    options = {"beta_fast": 16, "mscale": 0.7, "attention_factor": None, "truncate": False}
    got = hf_config.from_hf(config | {key: YARN | options})
    assert got.rope_theta == 5e5
    assert got.yarn == model_config.Yarn(4.0, 256, beta_fast=16, mscale=0.7, truncate=False)


def test_yarn_fills_in_what_is_left_out() -> None:
    config = {k: v for k, v in TINY.items() if k != "rope_parameters"}
    bare = hf_config.from_hf(config | {"rope_scaling": {"type": "yarn", "factor": 2}})
    assert bare.yarn == model_config.Yarn(2.0, 1024)  # max_position_embeddings
    no_factor = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert hf_config.from_hf(config | {"rope_scaling": no_factor}).yarn == model_config.Yarn(4, 256)


def test_absent_keys_are_what_transformers_defaults_to() -> None:
    keys = ("head_dim", "rope_theta", "rope_parameters", "norm_topk_prob", "mlp_only_layers")
    bare = {k: v for k, v in TINY.items() if k not in (*keys, "dtype", "torch_dtype")}
    got = hf_config.from_hf(bare)
    assert (got.head_dim, got.rope_theta, got.norm_topk_prob) == (128 // 4, 1e4, False)
    assert got.mlp_only_layers == () and got.param_dtype == jnp.float32
    assert hf_config.from_hf(bare | {"model_type": "qwen3"}).head_dim == 128
    assert hf_config.from_hf(bare | {"head_dim": None}).head_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type: expected one of \('qwen3', 'qwen3_moe'\)"),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu"'),
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"use_sliding_window": True}, "a window of 4096; if no text is longer"),
        ({"use_sliding_window": True, "sliding_window": 512}, "a window of 512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "take the unquantised checkpoint"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
        ({"dtype": "int8", "torch_dtype": "int8"}, "dtype: expected one of"),
        ({"num_local_experts": 4}, r"num_experts: expected one value, got \[4, 8\]"),
        ({"rope_theta": 1e4}, "rope_theta: expected one value"),
        ({"rope_scaling": YARN}, "rope_type: expected one value, got .'default', 'yarn'."),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"num_experts_per_tok": 9}, r"expected 1\.\.8"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hf_config.from_hf(TINY | changes)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "llama3"])
def test_other_ways_to_stretch_a_rope_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e6, "factor": 2.0}
    with pytest.raises(ModelError, match=f'expected "default" or "yarn", got \'{kind}\''):
        hf_config.from_hf(TINY | {"rope_parameters": rope})


def test_a_window_that_is_switched_off_is_no_window() -> None:
    off = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"]}
    assert hf_config.from_hf(TINY | off) == hf_config.from_hf(TINY)
    assert hf_config.from_hf(TINY | {"use_sliding_window": True, "sliding_window": None})


def test_everything_wrong_is_named_at_once() -> None:
    config = TINY | {"attention_bias": True, "hidden_act": "relu", "rope_theta": 1.0}
    del config["vocab_size"], config["hidden_size"]
    with pytest.raises(ModelError) as caught:
        hf_config.from_hf(config)
    for word in ("attention_bias", "hidden_act", "rope_theta", "vocab_size, hidden_size"):
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: expected a file"):
        hf_config.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: Expecting"):
        hf_config.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "x"}))
    with pytest.raises(ModelError, match=r"config\.json: cannot run this model"):
        hf_config.read_config(tmp_path)

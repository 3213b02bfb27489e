"""Sizes of the presets, kinds of layers, and configurations that are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.model import config as model_config
from clawgym_jax.model import qwen3


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (model_config.TINY, 577_600),
        (model_config.QWEN3_30B_A3B, 30_532_122_624),
        (model_config.QWEN3_8B, 8_190_735_360),
    ],
)
def test_number_of_parameters(config: model_config.Qwen3Config, parameters: int) -> None:
    _, params = qwen3.abstract(config)
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)) == parameters


def test_consecutive_layers_of_one_kind_are_one_segment() -> None:
    config = model_config.TINY.replace(num_layers=6, mlp_only_layers=(0, 3))
    assert config.segments == ((False, 1), (True, 2), (False, 1), (True, 2))
    assert config.num_moe_layers == 4
    stepped = model_config.TINY.replace(num_layers=4, decoder_sparse_step=2)
    assert [stepped.is_moe(i) for i in range(4)] == [False, True, False, True]
    assert model_config.QWEN3_8B.segments == ((False, 36),)


@pytest.mark.parametrize("preset", [model_config.TINY, model_config.QWEN3_8B])
def test_hugging_face_spelling_round_trips(preset: model_config.Qwen3Config) -> None:
    dtype = jnp.dtype(preset.param_dtype)
    expected = preset.replace(dtype=dtype, param_dtype=dtype)
    assert model_config.from_hf(model_config.to_hf(preset)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "expected 'qwen3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "expected plain rope"),
        ({"attention_bias": True}, "no attention bias"),
        ({"use_sliding_window": True}, "no sliding window"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"num_experts_per_tok": 9}, r"expected 1\.\.8"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config.from_hf(model_config.to_hf(model_config.TINY) | changes)

"""A Hugging Face config.json as a `Qwen3Config`, and back.

Two generations of names are in use; both are read, and both are written:
    transformers 4   num_experts         rope_theta, rope_scaling {type, factor, ...}   torch_dtype
    transformers 5   num_local_experts   rope_parameters {rope_type, rope_theta, ...}   dtype
A file that says the same thing twice in different ways is refused, not guessed at.

Invariant: `from_hf(to_hf(config))` is `config` up to the compute dtype.
Not here: weights, tokenizers.  Source: `Qwen3Config`, `Qwen3MoeConfig` and
`RotaryEmbeddingConfigMixin` of transformers 5.24, whose defaults stand where a key is absent.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model.config import Qwen3Config, Yarn

CONFIG = "config.json"
_MODEL_TYPES = ("qwen3", "qwen3_moe")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_YARN_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim")  # absent unless set


def read_config(folder: pathlib.Path | str) -> Qwen3Config:
    """The configuration in `folder`'s config.json."""
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        raise ModelError(f"{path}: expected a file; is this a Hugging Face model folder?")
    try:
        return from_hf(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # not JSON
        raise ModelError(f"{path}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def from_hf(config: Mapping[str, Any]) -> Qwen3Config:
    """Reads a config.json of either generation; everything wrong with it is named at once."""
    problems = _foreign(config) + _contradictions(config)
    if problems:
        raise ModelError("cannot run this model:\n  " + "\n  ".join(problems))
    dtype = jnp.dtype(_dtype(config))
    try:
        return Qwen3Config(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"] or config["num_attention_heads"],
            head_dim=config.get("head_dim") or _default_head_dim(config),
            intermediate_size=config["intermediate_size"],
            rope_theta=_theta(config),
            yarn=_yarn(config),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=_trained_tok(config),
            param_dtype=dtype,
            dtype=dtype,
            **_experts(config),
        )
    except ValueError as error:
        raise ModelError(f"cannot run this model: {error}") from error


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    """The config.json that transformers (4 and 5) reads as this model.

    transformers 4 ignores YaRN's factor where the trained length is given, and takes
    max_position_embeddings / original_max_position_embeddings: keep the two equal.
    """
    dtype = jnp.dtype(config.param_dtype).name
    out: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if config.num_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if config.num_experts else "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": config.rope_theta,
    }
    if config.yarn is None:
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    else:
        out["rope_scaling"] = _yarn_to_hf(config.yarn)
        out["rope_parameters"] = out["rope_scaling"] | {"rope_theta": config.rope_theta}
    return out | _experts_to_hf(config) if config.num_experts else out


def _foreign(config: Mapping[str, Any]) -> list[str]:
    """What this code has no branch for."""
    kind, act = config.get("model_type"), config.get("hidden_act", "silu")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    slides = config.get("use_sliding_window") and config.get("sliding_window", 4096)
    rope, dtype = _rope(config), _dtype(config)
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    missing = [key for key in _REQUIRED if key not in config]
    found: dict[str, Any] = {
        f"model_type: expected one of {_MODEL_TYPES}, got {kind!r}": kind not in _MODEL_TYPES,
        f"expected {', '.join(missing)}: absent": missing,
        f'hidden_act: expected "silu", got {act!r}': act != "silu",
        "attention_bias: expected false, got true (Qwen3 has none; a Qwen2 checkpoint?)": (
            config.get("attention_bias")
        ),
        f"use_sliding_window: expected false, got a window of {slides}; if no text is longer "
        "than that, set it to false": slides,
        f"layer_types: expected only full_attention, got also {sorted(layers)}": layers,
        "quantization_config: expected none; take the unquantised checkpoint, or dequantise it": (
            config.get("quantization_config")
        ),
        f'rope_type: expected "default" or "yarn", got {_rope_type(rope)!r}': (
            _rope_type(rope) not in ("default", "yarn")
        ),
        f"partial_rotary_factor: expected 1, got {rotated}": rotated not in (None, 1),
        f"dtype: expected one of {_DTYPES}, got {dtype!r}": dtype not in _DTYPES,
    }
    return [message for message, wrong in found.items() if wrong]


def _contradictions(config: Mapping[str, Any]) -> list[str]:
    """What the two generations of names say differently."""
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    ropes = [rope for rope in (parameters, scaling) if rope]
    said = {
        "num_experts": [config.get("num_experts"), config.get("num_local_experts")],
        "rope_theta": [config.get("rope_theta")] + [rope.get("rope_theta") for rope in ropes],
        "rope_type": [_rope_type(rope) for rope in ropes],
        "factor": [rope.get("factor") for rope in ropes],
        "dtype": [config.get("dtype"), config.get("torch_dtype")],
    }
    values = {
        name: {value for value in all_of if value is not None} for name, all_of in said.items()
    }
    return [
        f"{name}: expected one value, got {sorted(found)}; remove the wrong one"
        for name, found in values.items()
        if len(found) > 1
    ]


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["model_type"] != "qwen3_moe":
        return {}
    return {
        "num_experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "num_experts_per_tok": config.get("num_experts_per_tok", 8),
        "moe_intermediate_size": config.get("moe_intermediate_size", 768),
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1),
        "mlp_only_layers": tuple(config.get("mlp_only_layers") or ()),
    }


def _experts_to_hf(config: Qwen3Config) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def _default_head_dim(config: Mapping[str, Any]) -> int:
    """transformers' dense class says 128; its mixture class derives the width."""
    if config["model_type"] == "qwen3":
        return 128
    return int(config["hidden_size"] // config["num_attention_heads"])


def _trained_tok(config: Mapping[str, Any]) -> int:
    return int(config.get("max_position_embeddings", 32768))


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _theta(config: Mapping[str, Any]) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 1e4)


def _yarn(config: Mapping[str, Any]) -> Yarn | None:
    rope = _rope(config)
    if _rope_type(rope) != "yarn":
        return None
    trained = (
        config.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or _trained_tok(config)
    )
    options = {key: rope[key] for key in _YARN_OPTIONS if rope.get(key) is not None}
    return Yarn(
        factor=float(rope.get("factor") or _trained_tok(config) / trained),
        original_max_position_embeddings=trained,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        **options,
    )


def _yarn_to_hf(yarn: Yarn) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    options = {key: getattr(yarn, key) for key in _YARN_OPTIONS}
    return out | {key: value for key, value in options.items() if value is not None}

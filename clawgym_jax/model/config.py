"""The shape of a Qwen3 model, dense or mixture of experts, and how Hugging Face spells it.

`Qwen3Config` says nothing about devices, sharding or training.  Source of the field names:
`Qwen3Config` and `Qwen3MoeConfig` of transformers.

Invariant: `from_hf(to_hf(config))` is `config` up to the compute dtype.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Static description of one model; hashable, so usable as a static jit argument."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # width of a dense MLP
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # width of one expert
    norm_topk_prob: bool = True  # gate weights of the chosen experts sum to 1
    decoder_sparse_step: int = 1  # every n-th layer is a mixture
    mlp_only_layers: tuple[int, ...] = ()  # layers that stay dense
    rope_theta: float = 1e6
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    dtype: DTypeLike = jnp.float32  # of activations
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: expected 1..{self.num_experts}, "
                f"got {self.num_experts_per_tok}"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (0-based) holds experts rather than one dense MLP."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def segments(self) -> tuple[tuple[bool, int], ...]:
        """Maximal runs of consecutive layers of one kind: (is mixture, number of layers)."""
        runs: list[tuple[bool, int]] = []
        for layer in range(self.num_layers):
            kind = self.is_moe(layer)
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return tuple(runs)

    @property
    def num_moe_layers(self) -> int:
        return sum(count for kind, count in self.segments if kind)

    def replace(self, **changes: Any) -> "Qwen3Config":
        return dataclasses.replace(self, **changes)


def from_hf(config: Mapping[str, Any]) -> Qwen3Config:
    """Reads a config.json of either generation (flat rope_theta, or rope_parameters)."""
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"model_type: expected 'qwen3' or 'qwen3_moe', got {kind!r}")
    rope = config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", "default") != "default" or config.get("rope_scaling")
    if scaling or config.get("attention_bias") or config.get("use_sliding_window"):
        raise ValueError(
            "expected plain rope, no attention bias and no sliding window; got "
            f"rope={rope or config.get('rope_scaling')}, bias={config.get('attention_bias')}, "
            f"sliding={config.get('use_sliding_window')}: convert the checkpoint first"
        )
    experts: dict[str, Any] = {}
    if kind == "qwen3_moe":
        experts = {
            "num_experts": config.get("num_experts", config.get("num_local_experts", 128)),
            "num_experts_per_tok": config.get("num_experts_per_tok", 8),
            "moe_intermediate_size": config.get("moe_intermediate_size", 768),
            "norm_topk_prob": config.get("norm_topk_prob", False),
            "decoder_sparse_step": config.get("decoder_sparse_step", 1),
            "mlp_only_layers": tuple(config.get("mlp_only_layers") or ()),
        }
    heads = config["num_attention_heads"]
    return Qwen3Config(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", 128),
        intermediate_size=config["intermediate_size"],
        rope_theta=float(config.get("rope_theta", rope.get("rope_theta", 1e6))),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        param_dtype=jnp.dtype(config.get("dtype", config.get("torch_dtype", "float32"))),
        dtype=jnp.dtype(config.get("dtype", config.get("torch_dtype", "float32"))),
        **experts,
    )


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    """The config.json that transformers (old and new) reads as this model."""
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
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": jnp.dtype(config.param_dtype).name,
        "dtype": jnp.dtype(config.param_dtype).name,
    }
    if config.num_experts:
        out |= {
            "num_experts": config.num_experts,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": config.decoder_sparse_step,
            "mlp_only_layers": list(config.mlp_only_layers),
        }
    return out


TINY = Qwen3Config(  # 577,600 parameters: the shipped base model
    vocab_size=1024,
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)

QWEN3_30B_A3B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)

"""The shape of a Qwen3 model, dense or mixture of experts, and the published ones by name.

Says nothing about devices, sharding or training; how Hugging Face spells it is `hf_config`.

Invariant: a configuration alone fixes every parameter's shape (`num_parameters` counts them).
Source of the field names and numbers: transformers' `Qwen3Config` and `Qwen3MoeConfig`, and the
config.json files of Qwen/Qwen3-8B, Qwen3-32B and Qwen3-30B-A3B.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Yarn:
    """How positions beyond the trained ones are squeezed in (arXiv:2309.00071)."""

    factor: float  # tokens wanted / tokens trained on
    original_max_position_embeddings: int  # tokens trained on
    beta_fast: float = 32.0  # pairs that turn more often than this stay as trained
    beta_slow: float = 1.0  # pairs that turn less often than this are fully stretched
    attention_factor: float | None = None  # on cos and sin; None: from factor and mscale
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the range between the betas to whole pairs


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
    yarn: Yarn | None = None  # None: plain rotary embedding
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

    @property
    def num_parameters(self) -> int:
        return self._count(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: of the experts, only those that it is routed to."""
        return self._count(self.num_experts_per_tok)

    def _count(self, experts: int) -> int:
        """Parameters with `experts` of them in a mixture layer; router and tables whole."""
        d, hd, mixtures = self.hidden_size, self.head_dim, self.num_moe_layers
        attention = 2 * d * hd * (self.num_heads + self.num_kv_heads)
        norms = 2 * d + 2 * hd
        mixture = d * self.num_experts + experts * 3 * d * self.moe_intermediate_size
        layers = self.num_layers * (attention + norms) + mixtures * mixture
        layers += (self.num_layers - mixtures) * 3 * d * self.intermediate_size
        tables = 1 if self.tie_word_embeddings else 2
        return layers + tables * self.vocab_size * d + d

    def replace(self, **changes: Any) -> "Qwen3Config":
        return dataclasses.replace(self, **changes)


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

QWEN3_32B = Qwen3Config(
    vocab_size=151936,
    hidden_size=5120,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=25600,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)

NAMED = {
    "tiny": TINY,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "qwen3_8b": QWEN3_8B,
    "qwen3_32b": QWEN3_32B,
}

"""The least matrix work that a training step has to do, from the model and the tree alone.

Ideal = 3 x the forward FLOPs (forward, and twice that backward) of the matrix products of the
active parameters on unique tokens, plus those of attention over live token pairs. The output head
counts on the tokens whose log-probs are wanted. Recomputation, padding and masked blocks are not
in it: they are what a compiled program is measured against.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.model.config import Qwen3Config

BACKWARD = 3  # forward + gradient of the inputs + gradient of the weights


@dataclass(frozen=True, slots=True)
class Forward:
    """FLOPs of one forward pass over all rows."""

    layers: int  # projections, MLPs, active experts, router
    head: int
    attention: int

    @property
    def total(self) -> int:
        return self.layers + self.head + self.attention

    @property
    def trunk(self) -> int:
        """Without the output head: the value model's, whose own head is a vector (not counted)."""
        return self.layers + self.attention


def forward_flops(model: Qwen3Config, tokens: int, scored_tok: int, live_pairs: int) -> Forward:
    """tokens: unique ones; scored_tok: with a log-prob; live_pairs: (query, key) seen, all rows."""
    d, hd = model.hidden_size, model.head_dim
    attention_weights = d * hd * (2 * model.num_heads + 2 * model.num_kv_heads)
    layers = 0
    for is_moe, count in model.segments:
        if is_moe:
            experts = 3 * d * model.moe_intermediate_size * model.num_experts_per_tok
            weights = attention_weights + d * model.num_experts + experts
        else:
            weights = attention_weights + 3 * d * model.intermediate_size
        layers += count * weights
    per_pair = 2 * 2 * model.num_heads * hd  # scores, and the weighted sum of values
    return Forward(
        layers=2 * tokens * layers,
        head=2 * scored_tok * d * model.vocab_size,
        attention=model.num_layers * live_pairs * per_pair,
    )


def training_flops(model: Qwen3Config, tokens: int, scored_tok: int, live_pairs: int) -> int:
    return BACKWARD * forward_flops(model, tokens, scored_tok, live_pairs).total

"""Ideal work, roofline and memory: against counts by hand and against a compiled model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.compiled.chips import CHIPS, chip_of, roofline
from clawgym_jax.compiled.flops import count_flops
from clawgym_jax.compiled.hlo import parse
from clawgym_jax.compiled.ideal import forward_flops, training_flops
from clawgym_jax.compiled.memory import largest_buffers, peak_of
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.qwen3 import abstract, apply, apply_logits

DENSE = Qwen3Config(
    vocab_size=96, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48,
)  # fmt: skip


@pytest.mark.parametrize("head", [True, False])
def test_ideal_forward_is_what_a_dense_forward_pass_compiles_to(head: bool) -> None:
    """With every pair of tokens computed (the dense oracle) the compiler's count is the ideal."""
    rows, length = 2, 24
    graph, params = abstract(DENSE)

    def forward(params, tokens: jax.Array) -> jax.Array:
        end = jnp.full(tokens.shape, length, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

        def attend(q, k, v, cache):
            return dense_tree_attention(q, k, v, end), None

        hidden = apply(graph, params, tokens, positions, attend).hidden
        return apply_logits(graph, params, hidden) if head else hidden

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    text = jax.jit(forward).lower(params, tokens).compile().as_text()
    count = rows * length
    ideal = forward_flops(DENSE, count, count, live_pairs=rows * length * length)
    assert count_flops(parse(text)).total == (ideal.total if head else ideal.trunk)


def test_active_experts_only() -> None:
    mixture = DENSE.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    dense, moe = (forward_flops(m, 10, 0, 0).layers for m in (DENSE, mixture))
    assert moe - dense == 2 * 10 * 3 * (3 * 32 * 24 * 2 + 32 * 8 - 3 * 32 * 48)
    assert training_flops(DENSE, 10, 5, 7) == 3 * forward_flops(DENSE, 10, 5, 7).total


def test_the_paper_model_has_its_active_parameters() -> None:
    """Qwen3-30B-A3B: 3.35 B active, of which the embedding is looked up, not multiplied."""
    model = Qwen3Config(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4,
        head_dim=128, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    )  # fmt: skip
    active = forward_flops(model, 1, 1, 0).total / 2
    assert active == pytest.approx(3.35e9 - 151936 * 2048, rel=0.002)


def test_roofline() -> None:
    chip = chip_of("v5p:4x4x4")
    assert chip is CHIPS["v5p"]
    found = roofline(chip, flops=2 * chip.bf16_flops, ideal_flops=chip.bf16_flops,
                     received_bytes=chip.ici_bytes_per_s)  # fmt: skip
    assert found.step_s == (2.0, 3.0)
    assert found.mfu == pytest.approx((1 / 3, 1 / 2))
    with pytest.raises(ConfigError, match="expected CHIP:SHAPE"):
        chip_of("v9:2x2")


def test_memory_of_a_compiled_program(tmp_path) -> None:
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        big = jnp.sin(x)[:, None] * jnp.cos(y)[None, :]
        return jnp.sort(big, axis=0) @ y

    x = jax.ShapeDtypeStruct((1000,), np.float32)
    lowered = jax.jit(program).lower(x, x)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    peak = peak_of(compiled)
    assert peak.arguments == 8000 and peak.outputs == 4000
    assert 4_000_000 <= peak.peak <= 9_000_000
    buffers = largest_buffers(tmp_path)
    assert buffers[0].bytes == 4_000_000 and buffers[0].shape.startswith("f32[1000,1000]")
    assert len(buffers) <= 10 and buffers == sorted(buffers, key=lambda b: -b.bytes)

"""The TPU kernels through the real TPU compiler, for chips that are not here.

What one chip gets of Qwen3-30B-A3B on a mesh with eight-way heads: 4 query heads and 1 key-value
head of 128, bfloat16. Nothing runs; the figures are the compiler's.
"""

import functools
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from clawgym_jax.compiled.topology import devices_of
from clawgym_jax.model import attention, live_blocks
from clawgym_jax.model.tree_attention_tpu import Tiling, matmul_flops, pallas_tree_attention
from tests.model import topology

HEADS, WIDTH = 4, 128
KERNEL = 'custom_call_target="tpu_custom_call"'
NAMED_KERNEL = r"%\S*tree_attention_(\w+?)_*\.?\d* = .*" + re.escape(KERNEL)
BACKWARD = {"fused": ["dqkv"], "split": ["dq", "dkv"]}
SPLITS = {"v5p": None, "v6e": 1, "v5e": 1}


def _shapes(length: int) -> list[jax.ShapeDtypeStruct]:
    heads = HEADS, 1, 1, HEADS
    inputs = [jax.ShapeDtypeStruct((1, length, h, WIDTH), jnp.bfloat16) for h in heads]
    return [jax.ShapeDtypeStruct((1, length), jnp.int32), *inputs]


def _results(attend: Any, end: jax.Array, *inputs: jax.Array) -> Any:
    *qkv, upstream = inputs
    out, pull_back = jax.vjp(lambda *x: attend(*x, end), *qkv)
    return out, pull_back(upstream)


@pytest.mark.parametrize(
    ("length", "block", "backward"),
    [(4096, 256, "fused"), (65536, 512, "fused"), (65536, 512, "split")],
)
@pytest.mark.parametrize("kind", topology.CHIPS)
def test_compiles_for(
    kind: str, length: int, block: int, backward: Literal["fused", "split"]
) -> None:
    tiling = Tiling(block, block, SPLITS[kind], backward)
    attend = functools.partial(pallas_tree_attention, tiling=tiling)
    program = functools.partial(_results, attend)
    compiled = topology.compile_for_chip(kind, program, *_shapes(length))
    names = re.findall(NAMED_KERNEL, compiled.as_text())
    assert sorted(names) == sorted(["forward", *BACKWARD[backward]])
    dense = 4 * HEADS * length**2  # one f32 score per query head and token pair
    linear = 4 * HEADS * length * WIDTH  # one f32 array of the size of q
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 4 * linear
    assert used < dense / 4
    live = live_blocks.most_pairs(length, block, block)
    flops = sum(matmul_flops(live, tiling, HEADS, WIDTH, length))
    assert compiled.cost_analysis()["flops"] == pytest.approx(flops, rel=0.1)


def test_compiles_in_shard_map_for_four_chips() -> None:
    """Rows and query heads on a 2 x 2 mesh, one key-value head on both chips of a row."""
    mesh = Mesh(topology.chips("v6e").reshape(2, 2), ("fsdp", "tensor"))
    rows, heads = P("fsdp"), P("fsdp", None, "tensor")
    attend = jax.shard_map(
        pallas_tree_attention, mesh=mesh, in_specs=(heads, rows, rows, rows), out_specs=heads
    )
    shapes = [
        jax.ShapeDtypeStruct((2, *s.shape[1:]), s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in zip(_shapes(1024), (rows, heads, rows, rows, heads), strict=True)
    ]
    text = jax.jit(functools.partial(_results, attend)).lower(*shapes).compile().as_text()
    assert text.count(KERNEL) == 2
    assert "all-reduce" in text  # the gradients of keys and values, over the chips of a row
    assert "all-gather" not in text


def test_compiles_in_shard_map_for_eight_chips() -> None:
    """Rows of 64K tokens and four key-value heads on a 2 x 4 mesh: a chip's share is _shapes'."""
    topology.chips("v5p")  # skips where there is no compiler
    mesh = Mesh(np.asarray(devices_of("v5p:2x2x2")).reshape(2, 4), ("fsdp", "tensor"))
    rows, heads = P("fsdp"), P("fsdp", None, "tensor")
    attend = jax.shard_map(
        pallas_tree_attention, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads
    )
    whole = [(2, 65536), *((2, 65536, 4 * s.shape[2], WIDTH) for s in _shapes(65536)[1:])]
    shapes = [
        jax.ShapeDtypeStruct(shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for shape, s, spec in zip(whole, _shapes(1), (rows, *[heads] * 4), strict=True)
    ]
    compiled = jax.jit(functools.partial(_results, attend)).lower(*shapes).compile()
    assert sorted(re.findall(NAMED_KERNEL, compiled.as_text())) == ["dqkv", "forward"]
    assert not re.search(r"all-(reduce|gather|to-all)", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * HEADS * 65536 * WIDTH


def test_an_output_kept_by_name_is_not_computed_again() -> None:
    """Under jax.checkpoint; the square makes the output itself wanted in the backward pass."""

    def results(policy: Any, end: jax.Array, *qkv: jax.Array) -> Any:
        def layer(*qkv: jax.Array) -> jax.Array:
            scaled = (x * x for x in qkv)  # something else to recompute
            return jnp.square(pallas_tree_attention(*scaled, end))

        kept = jax.checkpoint(layer, policy=policy)
        return jax.value_and_grad(
            lambda *x: jnp.sum(kept(*x).astype(jnp.float32)), argnums=(0, 1, 2)
        )(*qkv)

    kernels = []
    for policy in (
        jax.checkpoint_policies.save_only_these_names(attention.OUT, attention.LSE),
        jax.checkpoint_policies.nothing_saveable,
    ):
        shape = jax.ShapeDtypeStruct((1, 256, 1, WIDTH), jnp.bfloat16)
        shapes = jax.ShapeDtypeStruct((1, 256), jnp.int32), shape, shape, shape
        program = functools.partial(results, policy)
        text = topology.compile_for_chip("v5e", program, *shapes).as_text()
        kernels.append(text.count(KERNEL))
    assert kernels == [2, 3]

"""Tree attention as Pallas kernels for TPUs, forward and backward.

Same function and signature as `attention.dense_tree_attention` (the oracle) and
`tree_attention.tree_attention` (its twin in plain XLA).  Work is exact: the kernels run over a
list of the live block pairs, made from `end` on the device, so a traced `end` needs no bound
from the caller and a pair without attention costs neither products nor copies.
`live_blocks.count_pairs` says how much work that is, `matmul_flops` what it costs.

Reading order: this file (shapes, gradient rule) -> `tree_attention_tpu_blocks` (grid) ->
`tree_attention_tpu_forward`, `tree_attention_tpu_backward`, `tree_attention_tpu_fused` (kernels).

Use: inside `jax.shard_map`, on whole rows and whole groups of heads (XLA cannot split a kernel);
rows are an axis, so no `vmap` is needed (under one, the calls become a loop).  Under
`jax.checkpoint` the output and the log-sum-exp can be kept by name (`OUT` and `LSE` of
`attention`): the backward pass then runs no forward kernel.

Invariant: every token sees itself; padding is `end[j] = j + 1`.
Not for CPUs and GPUs, except with `interpret=True`, which is slow and meant for tests (and
needs `check_vma=False` under shard_map; the compiled kernels do not).
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from clawgym_jax.model import live_blocks
from clawgym_jax.model.attention import LSE, OUT
from clawgym_jax.model.tree_attention_tpu_backward import (
    KEY_PRODUCTS,
    QUERY_PRODUCTS,
    key_gradients,
    query_gradient,
)
from clawgym_jax.model.tree_attention_tpu_blocks import LANES, Plan
from clawgym_jax.model.tree_attention_tpu_forward import PRODUCTS, forward
from clawgym_jax.model.tree_attention_tpu_fused import (
    FUSED_PRODUCTS,
    all_gradients,
    blocks_nest,
    row_gradient_bytes,
)


class Tiling(NamedTuple):
    """How a call is cut.

    Larger blocks spend less on each step, smaller ones less on the ragged edges of branches.
    `splits` divides the query heads of a key-value head among programs. By default a program has
    at most MAX_HEADS heads, for vector memory's sake, and the number of programs is even where it
    can be, so that both cores of a v5p have work; on a chip with one core (v5e, v6e) splits=1 is
    some percent faster for up to MAX_HEADS heads.

    The fused backward kernel needs vector memory for the query gradient of whole rows:
    `row_bytes` is what it may take, and it takes as many heads to a program as fit. The default,
    a head of 128 in a row of 64K tokens, suits a v5p (64 MiB a core); v5e and v6e have 128 MiB.
    "auto" is fused where one head fits, else split.
    """

    block_q: int = 512
    block_k: int = 512
    splits: int | None = None
    backward: Literal["auto", "fused", "split"] = "auto"
    row_bytes: int = 32 << 20


MAX_HEADS = 4


def pallas_tree_attention(
    q: jax.Array,  # f[B, N, H, hd]
    k: jax.Array,  # f[B, N, KV, hd]
    v: jax.Array,  # f[B, N, KV, hd]
    end: jax.Array,  # i32[B, N]
    tiling: Tiling = Tiling(),  # noqa: B008 (immutable)
    interpret: bool = False,
) -> jax.Array:
    """f[B, N, H, hd]: softmax attention under the tree mask, accumulated in float32."""
    plan, padded = _plan(q, k, v, end, tiling, interpret)
    rows, length, heads, width = q.shape
    extra = padded - length
    q, k, v, end = _same_mesh_axes(q, k, v, end.astype(jnp.int32))
    tail = jnp.arange(length, padded, dtype=jnp.int32) + 1  # padding sees itself
    ends = jnp.concatenate([end, jnp.broadcast_to(tail, (rows, extra))], axis=1)
    flat = (
        jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).reshape(rows * padded, -1)
        for x in (q, k, v)
    )
    out = _attention(plan, *flat, ends)
    return out.reshape(rows, padded, heads, width)[:, :length]


def matmul_flops(
    live_pairs: int, tiling: Tiling, heads: int, width: int, row_tok: int
) -> tuple[int, int]:
    """FLOPs of the products over that many live pairs of rows so long: (forward, backward)."""
    block_q, block_k, padded = _cut(tiling, row_tok)
    one = 2 * live_pairs * block_q * block_k * heads * width
    fused = _fused_heads(tiling, block_q, block_k, 1, width, padded)
    return PRODUCTS * one, (FUSED_PRODUCTS if fused else QUERY_PRODUCTS + KEY_PRODUCTS) * one


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: Plan,
    q: jax.Array,  # f[T, H * hd], all rows together
    k: jax.Array,  # f[T, KV * hd]
    v: jax.Array,  # f[T, KV * hd]
    end: jax.Array,  # i32[B, N]
) -> jax.Array:
    return _forward(plan, q, k, v, end)[0]


def _forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array
) -> tuple[jax.Array, Any]:
    pairs = live_blocks.list_pairs(end, plan.block_q, plan.block_k, hold_queries=True)
    out, lse = forward(plan, pairs, q, k, v, _through_rows(end))
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return out, (q, k, v, end, out, lse)


def _backward(
    plan: Plan, saved: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, end, out, lse = saved
    both = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.sum(both.reshape(-1, plan.programs * plan.heads, plan.width), axis=-1)
    inputs = q, k, v, _through_rows(end), d_out, lse, delta.T.reshape(lse.shape)
    by_key = live_blocks.list_pairs(end, plan.block_q, plan.block_k, hold_queries=False)
    if plan.fused_heads:
        dq, dk, dv = all_gradients(plan.fused(), end.shape[1], by_key, *inputs)
        return dq, dk, dv, None
    by_query = live_blocks.list_pairs(end, plan.block_q, plan.block_k, hold_queries=True)
    dq = query_gradient(plan, by_query, *inputs)
    dk, dv = key_gradients(plan, by_key, *inputs)
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _through_rows(end: jax.Array) -> jax.Array:
    """i32[1, B * N] from `end` i32[B, N]: tokens numbered through the rows."""
    rows, length = end.shape
    return (end + np.arange(rows, dtype=np.int32)[:, None] * length).reshape(1, -1)


def _same_mesh_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside shard_map: marks all arrays as differing over the mesh axes that any differs over.

    A head-sharded query with replicated keys then gets key gradients summed over the shards.
    """
    varying = [jax.typeof(x).mat.varying for x in arrays]
    axes = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(axes - own), to="varying")
        for x, own in zip(arrays, varying, strict=True)
    )


def _plan(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, tiling: Tiling, interpret: bool
) -> tuple[Plan, int]:
    """Static sizes, and the padded length of a row."""
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or end.shape != q.shape[:2]:
        raise ValueError(
            "expected q f[B, N, H, hd], k and v f[B, N, KV, hd], end i32[B, N]; got "
            f"{q.shape}, {k.shape}, {v.shape}, {end.shape}"
        )
    length, heads, width, kv_heads = q.shape[1], q.shape[2], q.shape[3], k.shape[2]
    splits = _default_splits(heads, kv_heads) if tiling.splits is None else tiling.splits
    if heads % (kv_heads * splits):
        raise ValueError(
            f"heads: expected a multiple of {kv_heads} key-value heads times {splits} splits, "
            f"got {heads}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(
            "expected q, k and v of one dtype, float32 or bfloat16; got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not interpret and (width % LANES or tiling.block_q % LANES or tiling.block_k % LANES):
        raise ValueError(
            f"on a TPU, expected head width and blocks in multiples of {LANES}, got width {width} "
            f"and {tiling}: pad the heads, or use the blocked attention"
        )
    block_q, block_k, padded = _cut(tiling, length)
    per_program = heads // (kv_heads * splits)
    fused = _fused_heads(tiling, block_q, block_k, per_program, width, padded)
    plan = Plan(block_q, block_k, kv_heads, splits, per_program, fused, width, interpret)
    return plan, padded


def _cut(tiling: Tiling, length: int) -> tuple[int, int, int]:
    """The blocks of a row, no longer than it needs, and its length padded to whole blocks."""
    whole = -(-length // LANES) * LANES
    block_q, block_k = min(tiling.block_q, whole), min(tiling.block_k, whole)
    unit = math.lcm(block_q, block_k)
    return block_q, block_k, -(-length // unit) * unit


def _fused_heads(
    tiling: Tiling, block_q: int, block_k: int, heads: int, width: int, row_tok: int
) -> int:
    """How many of a program's heads the fused backward kernel takes at once; 0: split kernels."""
    if tiling.backward == "split":
        return 0
    room = tiling.row_bytes // row_gradient_bytes(row_tok, width)
    if room and blocks_nest(block_q, block_k):
        return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= room)
    if tiling.backward == "fused":
        raise ValueError(
            f"backward='fused': expected row_bytes of at least {row_gradient_bytes(row_tok, width)}"
            f" for a row of {row_tok} tokens, and of block_q and block_k one that divides the "
            f"other; got {tiling}: use 'auto' or 'split', or smaller rows"
        )
    return 0


def _default_splits(heads: int, kv_heads: int) -> int:
    group = heads // kv_heads
    small = [s for s in range(1, group + 1) if group % s == 0 and group // s <= MAX_HEADS]
    even = [s for s in small if kv_heads * s % 2 == 0]
    return min(even or small or [1])

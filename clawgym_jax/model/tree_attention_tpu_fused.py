"""The fused backward kernel: all three gradients from five products per head and live pair.

The formulas are those of `tree_attention_tpu_backward`, whose two kernels (seven products) are
this one's twin, and its stand-in for rows that are too long.  Key blocks are held, with dK and dV
in vector memory, and query blocks stream past.  A query block comes by once per key block that
it sees, so dQ of a *whole row* stays in vector memory too, in float32, and lies there transposed:
dQ^T = K^T dS needs K^T, once per held block, where dQ = dS K would turn every dS around.

A query block's last key block is the one with its last token, at which it is written out and
wiped.  It leaves through an ordinary output block that follows the held key block.

Not here: when a row fits (`tree_attention_tpu`).
Invariant: between two rows, dQ in vector memory is zero.
Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clawgym_jax.model import live_blocks
from clawgym_jax.model import tree_attention_tpu_blocks as blocks
from clawgym_jax.model.tree_attention_tpu_backward import backward_inputs
from clawgym_jax.model.tree_attention_tpu_blocks import LANES, Plan

Ref = jax.Array  # a block in vector memory; indexing reads, assignment writes
FUSED_PRODUCTS = 5  # matrix products per head and pair: scores, dP, dV, dK, dQ
WORK_BYTES = 16 << 20  # vector memory for all but dQ: blocks of operands, scores, dK and dV


def row_gradient_bytes(row_tok: int, width: int) -> int:
    """Vector memory that dQ of a row takes per query head."""
    return 4 * row_tok * width


def blocks_nest(block_q: int, block_k: int) -> bool:
    """Whether one block holds whole blocks of the other kind, as this kernel needs."""
    return max(block_q, block_k) % min(block_q, block_k) == 0


def all_gradients(
    plan: Plan,
    row_tok: int,  # padded
    pairs: live_blocks.PairList,  # key blocks held
    q: jax.Array,  # f[T, H * hd]
    k: jax.Array,  # f[T, KV * hd]
    v: jax.Array,  # f[T, KV * hd]
    end: jax.Array,  # i32[1, T]
    d_out: jax.Array,  # f[T, H * hd]
    lse: jax.Array,  # f32[..., T], base 2, by query heads however grouped
    delta: jax.Array,  # f32[..., T], the same
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries f[T, H * hd], of keys and of values f[T, KV * hd]."""
    lse, delta = (x.reshape(plan.programs, plan.heads, -1) for x in (lse, delta))
    specs = blocks.make_specs(plan, hold_queries=False)
    part_dtype = k.dtype if plan.splits == 1 else jnp.float32
    part = ((plan.splits, *k.shape), part_dtype, specs.part)
    key_acc = pltpu.VMEM((plan.block_k, plan.width), jnp.float32)
    row_blocks = row_tok // plan.block_q
    dq, *parts = blocks.call(
        _tree_attention_dqkv,
        plan,
        pairs,
        inputs=backward_inputs(specs, q, k, v, end, d_out, lse, delta),
        outputs=[(q.shape, q.dtype, _query_of_held_key(plan)), part, part],
        scratch=[
            pltpu.VMEM((plan.heads, row_blocks, plan.width, plan.block_q), jnp.float32),
            key_acc,
            key_acc,
            pltpu.VMEM((plan.width, plan.block_k), k.dtype),
            pltpu.VMEM((plan.block_k, LANES), jnp.int32),
        ],
        products=FUSED_PRODUCTS,
        vmem_bytes=plan.heads * row_gradient_bytes(row_tok, plan.width) + WORK_BYTES,
    )
    dk, dv = (jnp.sum(x, axis=0).astype(k.dtype) for x in parts)
    return dq, dk, dv


def _query_of_held_key(plan: Plan) -> pl.BlockSpec:
    """dQ in blocks of the larger size: the one with the held key block's tokens."""
    size = max(plan.block_q, plan.block_k)
    keys = np.int32(size // plan.block_k)
    return pl.BlockSpec(
        (size, plan.heads * plan.width),
        lambda p, t, w: (jax.lax.div(live_blocks.held(w[t]), keys), p),
    )


def _tree_attention_dqkv(
    words: Ref,  # i32[P] in scalar memory
    q: Ref,  # f[bq, heads * hd]
    k: Ref,  # f[bk, hd]
    v: Ref,  # f[bk, hd]
    end: Ref,  # i32[1, bk]
    d_out: Ref,  # f[bq, heads * hd]
    lse: Ref,  # f32[heads, bq]
    delta: Ref,  # f32[heads, bq]
    dq: Ref,  # f[max(bq, bk), heads * hd]
    dk: Ref,  # f[bk, hd]
    dv: Ref,  # f[bk, hd]
    dq_row: Ref,  # f32[heads, row's query blocks, hd, bq], transposed
    dk_acc: Ref,  # f32[bk, hd]
    dv_acc: Ref,  # f32[bk, hd]
    key_turned: Ref,  # f[hd, bk]
    end_column: Ref,  # i32[bk, LANES]
    *,
    plan: Plan,
) -> None:
    word = words[pl.program_id(1)]
    q_block, k_block = live_blocks.streamed(word), live_blocks.held(word)
    place = jax.lax.rem(q_block, np.int32(dq_row.shape[1]))  # in its row

    @pl.when(pl.program_id(1) == 0)
    def start_program() -> None:
        _zero(dq_row)

    @pl.when(live_blocks.has(word, live_blocks.FIRST))
    def start() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)
        key_turned[...] = k[...].T
        end_column[...] = blocks.column(end[...])

    def step(masked: bool) -> None:
        key, value, turned = k[...], v[...], key_turned[...]
        if masked:
            ends = blocks.across(end_column[...], plan.block_q)
            seen = blocks.sees(plan, q_block, k_block, ends, query_axis=1)
        for head in range(plan.heads):
            query, upstream = q[:, plan.head(head)], d_out[:, plan.head(head)]
            scores = blocks.dot_t(key, query) * plan.scale
            if masked:
                scores = jnp.where(seen, scores, blocks.LOWEST)
            weights = jnp.exp2(scores - lse[pl.ds(head, 1)])
            d_weights = blocks.dot_t(value, upstream)
            d_scores = (weights * (d_weights - delta[pl.ds(head, 1)])).astype(query.dtype)
            dv_acc[...] += blocks.dot(weights.astype(upstream.dtype), upstream)
            dk_acc[...] += blocks.dot(d_scores, query)
            dq_row[head, place] += blocks.dot(turned, d_scores)

    blocks.when_masked_or_full(word, step)

    @pl.when(k_block == _last_key_block(plan, q_block))
    def finish_query() -> None:
        rows = _rows_of_query(plan, q_block)
        for head in range(plan.heads):
            share = dq_row[head, place].T / math.sqrt(plan.width)
            dq[rows, plan.head(head)] = share.astype(dq.dtype)
            dq_row[head, place] = jnp.zeros(dq_row.shape[2:], jnp.float32)

    @pl.when(live_blocks.has(word, live_blocks.LAST))
    def finish_key() -> None:
        dk[...] = (dk_acc[...] / math.sqrt(plan.width)).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def _zero(dq_row: Ref) -> None:
    """A loop, because written out it would be thousands of stores."""
    heads, row_blocks, *block = dq_row.shape

    def zero_block(place: Any, carry: None) -> None:
        for head in range(heads):
            dq_row[head, place] = jnp.zeros(block, jnp.float32)

    jax.lax.fori_loop(0, row_blocks, zero_block, None)


def _last_key_block(plan: Plan, q_block: jax.Array) -> jax.Array:
    """The key block with a query block's last token: live, and none after it is."""
    last = q_block * plan.block_q + (plan.block_q - 1)
    return jax.lax.div(last, np.int32(plan.block_k))


def _rows_of_query(plan: Plan, q_block: jax.Array) -> Any:
    """Where a query block stands in an output block."""
    count = max(plan.block_q, plan.block_k) // plan.block_q
    if count == 1:
        return slice(None)
    offset = jax.lax.rem(q_block, np.int32(count)) * plan.block_q
    return pl.ds(pl.multiple_of(offset, plan.block_q), plan.block_q)

"""The split backward pass: one kernel for gradients of queries, one for those of keys and values.

With weights P = exp2(scores - lse), recomputed from the saved lse, and the upstream gradient dO:
dV = P^T dO;  dP = dO V^T;  dS = P * (dP - delta), delta the row sums of dO * O;
dQ = dS K / sqrt(hd);  dK = dS^T Q / sqrt(hd).
The first holds query blocks, the second key blocks, so that a held block's gradient can stay in
vector memory whatever the row's length: the price is that scores and dP are computed twice.

Not here: the forward pass, and the kernel for rows that fit (`tree_attention_tpu_fused`).
 Invariant: each visits exactly the live pairs of the forward pass.
Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clawgym_jax.model import live_blocks
from clawgym_jax.model import tree_attention_tpu_blocks as blocks
from clawgym_jax.model.tree_attention_tpu_blocks import LANES, Plan

Ref = jax.Array  # a block in vector memory; indexing reads, assignment writes
QUERY_PRODUCTS = 3  # matrix products per head and pair: scores, dP, dQ
KEY_PRODUCTS = 4  # scores, dP, dV, dK


def query_gradient(
    plan: Plan,
    pairs: live_blocks.PairList,  # query blocks held
    q: jax.Array,  # f[T, H * hd]
    k: jax.Array,  # f[T, KV * hd]
    v: jax.Array,  # f[T, KV * hd]
    end: jax.Array,  # i32[1, T]
    d_out: jax.Array,  # f[T, H * hd]
    lse: jax.Array,  # f32[programs, heads, T], base 2
    delta: jax.Array,  # f32[programs, heads, T]
) -> jax.Array:
    """f[T, H * hd]."""
    specs = blocks.make_specs(plan, hold_queries=True)
    columns = pltpu.VMEM((plan.heads, plan.block_q, LANES), jnp.float32)
    (dq,) = blocks.call(
        _tree_attention_dq,
        plan,
        pairs,
        inputs=backward_inputs(specs, q, k, v, end, d_out, lse, delta),
        outputs=[(q.shape, q.dtype, specs.query)],
        scratch=[
            columns,
            columns,
            pltpu.VMEM((plan.heads, plan.block_q, plan.width), jnp.float32),
        ],
        products=QUERY_PRODUCTS,
    )
    return dq


def key_gradients(
    plan: Plan,
    pairs: live_blocks.PairList,  # key blocks held
    q: jax.Array,  # f[T, H * hd]
    k: jax.Array,  # f[T, KV * hd]
    v: jax.Array,  # f[T, KV * hd]
    end: jax.Array,  # i32[1, T]
    d_out: jax.Array,  # f[T, H * hd]
    lse: jax.Array,  # f32[programs, heads, T], base 2
    delta: jax.Array,  # f32[programs, heads, T]
) -> tuple[jax.Array, jax.Array]:
    """Gradients of keys and values, f[T, KV * hd] each."""
    specs = blocks.make_specs(plan, hold_queries=False)
    dtype = k.dtype if plan.splits == 1 else jnp.float32
    part = ((plan.splits, *k.shape), dtype, specs.part)
    acc = pltpu.VMEM((plan.block_k, plan.width), jnp.float32)
    parts = blocks.call(
        _tree_attention_dkv,
        plan,
        pairs,
        inputs=backward_inputs(specs, q, k, v, end, d_out, lse, delta),
        outputs=[part, part],
        scratch=[acc, acc, pltpu.VMEM((plan.block_k, LANES), jnp.int32)],
        products=KEY_PRODUCTS,
    )
    dk, dv = (jnp.sum(x, axis=0).astype(k.dtype) for x in parts)
    return dk, dv


def backward_inputs(
    specs: blocks.Specs,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    end: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """The operands of every backward kernel, with their blocks."""
    return [
        (q, specs.query),
        (k, specs.key),
        (v, specs.key),
        (end, specs.end),
        (d_out, specs.query),
        (lse, specs.stat),
        (delta, specs.stat),
    ]


def _tree_attention_dq(
    words: Ref,  # i32[P] in scalar memory
    q: Ref,  # f[bq, heads * hd]
    k: Ref,  # f[bk, hd]
    v: Ref,  # f[bk, hd]
    end: Ref,  # i32[1, bk]
    d_out: Ref,  # f[bq, heads * hd]
    lse: Ref,  # f32[heads, bq]
    delta: Ref,  # f32[heads, bq]
    dq: Ref,  # f[bq, heads * hd]
    lse_column: Ref,  # f32[heads, bq, LANES]
    delta_column: Ref,  # f32[heads, bq, LANES]
    acc: Ref,  # f32[heads, bq, hd]
    *,
    plan: Plan,
) -> None:
    word = words[pl.program_id(1)]

    @pl.when(live_blocks.has(word, live_blocks.FIRST))
    def start() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        for head in range(plan.heads):
            lse_column[head] = blocks.column(lse[pl.ds(head, 1)])
            delta_column[head] = blocks.column(delta[pl.ds(head, 1)])

    def step(masked: bool) -> None:
        key, value = k[...], v[...]
        if masked:
            at = live_blocks.held(word), live_blocks.streamed(word)
            seen = blocks.sees(plan, *at, end[...], query_axis=0)
        for head in range(plan.heads):
            scores = blocks.dot_t(q[:, plan.head(head)], key) * plan.scale
            if masked:
                scores = jnp.where(seen, scores, blocks.LOWEST)
            weights = jnp.exp2(scores - blocks.across(lse_column[head], plan.block_k))
            d_weights = blocks.dot_t(d_out[:, plan.head(head)], value)
            d_scores = weights * (d_weights - blocks.across(delta_column[head], plan.block_k))
            acc[head] += blocks.dot(d_scores.astype(key.dtype), key)

    blocks.when_masked_or_full(word, step)

    @pl.when(live_blocks.has(word, live_blocks.LAST))
    def finish() -> None:
        for head in range(plan.heads):
            dq[:, plan.head(head)] = (acc[head] / math.sqrt(plan.width)).astype(dq.dtype)


def _tree_attention_dkv(
    words: Ref,  # i32[P] in scalar memory
    q: Ref,  # f[bq, heads * hd]
    k: Ref,  # f[bk, hd]
    v: Ref,  # f[bk, hd]
    end: Ref,  # i32[1, bk]
    d_out: Ref,  # f[bq, heads * hd]
    lse: Ref,  # f32[heads, bq]
    delta: Ref,  # f32[heads, bq]
    dk: Ref,  # f[bk, hd]
    dv: Ref,  # f[bk, hd]
    dk_acc: Ref,  # f32[bk, hd]
    dv_acc: Ref,  # f32[bk, hd]
    end_column: Ref,  # i32[bk, LANES]
    *,
    plan: Plan,
) -> None:
    word = words[pl.program_id(1)]

    @pl.when(live_blocks.has(word, live_blocks.FIRST))
    def start() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)
        end_column[...] = blocks.column(end[...])

    def step(masked: bool) -> None:
        key, value = k[...], v[...]
        if masked:
            at = live_blocks.streamed(word), live_blocks.held(word)
            ends = blocks.across(end_column[...], plan.block_q)
            seen = blocks.sees(plan, *at, ends, query_axis=1)
        for head in range(plan.heads):
            query, upstream = q[:, plan.head(head)], d_out[:, plan.head(head)]
            scores = blocks.dot_t(key, query) * plan.scale
            if masked:
                scores = jnp.where(seen, scores, blocks.LOWEST)
            weights = jnp.exp2(scores - lse[pl.ds(head, 1)])
            d_weights = blocks.dot_t(value, upstream)
            d_scores = weights * (d_weights - delta[pl.ds(head, 1)])
            dv_acc[...] += blocks.dot(weights.astype(upstream.dtype), upstream)
            dk_acc[...] += blocks.dot(d_scores.astype(query.dtype), query)

    blocks.when_masked_or_full(word, step)

    @pl.when(live_blocks.has(word, live_blocks.LAST))
    def finish() -> None:
        dk[...] = (dk_acc[...] / math.sqrt(plan.width)).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)

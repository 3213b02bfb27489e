"""The forward kernel: attention of the live block pairs, query blocks held.

A running softmax per query: its highest score so far (`top`), the sum of weights (`total`) and
the weighted sum of values (`acc`) stay in vector memory while the key blocks stream past.
A masked score is LOWEST, not minus infinity; weights that a query collects before its first
visible key are wiped out (multiplied by exp2(LOWEST - score) = 0) when that key arrives, and
every query has one, itself, in the last pair of its block.

Not here: gradients (`tree_attention_tpu_backward`).
Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 1.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clawgym_jax.model import live_blocks
from clawgym_jax.model import tree_attention_tpu_blocks as blocks
from clawgym_jax.model.tree_attention_tpu_blocks import LANES, Plan

Ref = jax.Array  # a block in vector memory; indexing reads, assignment writes
PRODUCTS = 2  # matrix products per head and pair: scores, output


def forward(
    plan: Plan,
    pairs: live_blocks.PairList,  # query blocks held
    q: jax.Array,  # f[T, H * hd]
    k: jax.Array,  # f[T, KV * hd]
    v: jax.Array,  # f[T, KV * hd]
    end: jax.Array,  # i32[1, T]
) -> tuple[jax.Array, jax.Array]:
    """The output f[T, H * hd] and the base-2 log of each softmax's denominator.

    The latter is f32[programs, heads, T].
    """
    specs = blocks.make_specs(plan, hold_queries=True)
    columns = pltpu.VMEM((plan.heads, plan.block_q, LANES), jnp.float32)
    out, lse = blocks.call(
        _tree_attention_forward,
        plan,
        pairs,
        inputs=[(q, specs.query), (k, specs.key), (v, specs.key), (end, specs.end)],
        outputs=[
            (q.shape, q.dtype, specs.query),
            ((plan.programs, plan.heads, q.shape[0]), jnp.float32, specs.stat),
        ],
        scratch=[
            columns,
            columns,
            pltpu.VMEM((plan.heads, plan.block_q, plan.width), jnp.float32),
        ],
        products=PRODUCTS,
    )
    return out, lse


def _tree_attention_forward(
    words: Ref,  # i32[P] in scalar memory
    q: Ref,  # f[bq, heads * hd]
    k: Ref,  # f[bk, hd]
    v: Ref,  # f[bk, hd]
    end: Ref,  # i32[1, bk]
    out: Ref,  # f[bq, heads * hd]
    lse: Ref,  # f32[heads, bq]
    top: Ref,  # f32[heads, bq, LANES]
    total: Ref,  # f32[heads, bq, LANES]
    acc: Ref,  # f32[heads, bq, hd]
    *,
    plan: Plan,
) -> None:
    word = words[pl.program_id(1)]

    @pl.when(live_blocks.has(word, live_blocks.FIRST))
    def start() -> None:
        top[...] = jnp.full(top.shape, blocks.LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def step(masked: bool) -> None:
        key, value = k[...], v[...]
        if masked:
            at = live_blocks.held(word), live_blocks.streamed(word)
            seen = blocks.sees(plan, *at, end[...], query_axis=0)
        for head in range(plan.heads):
            scores = blocks.dot_t(q[:, plan.head(head)], key) * plan.scale
            if masked:
                scores = jnp.where(seen, scores, blocks.LOWEST)
            before = top[head]
            higher = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - blocks.across(higher, plan.block_k))
            shrink = jnp.exp2(before - higher)
            top[head] = higher
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            added = blocks.dot(weights.astype(value.dtype), value)
            acc[head] = acc[head] * blocks.across(shrink, plan.width) + added

    blocks.when_masked_or_full(word, step)

    @pl.when(live_blocks.has(word, live_blocks.LAST))
    def finish() -> None:
        for head in range(plan.heads):
            share = acc[head] / blocks.across(total[head], plan.width)
            out[:, plan.head(head)] = share.astype(out.dtype)
            lse[pl.ds(head, 1)] = blocks.row(top[head] + jnp.log2(total[head]))

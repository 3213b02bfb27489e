"""Blocked attention over a packed prefix tree (flash attention in plain XLA).

Same function as `attention.dense_tree_attention`: token i sees token j iff `j <= i < end[j]`.
Nothing N x N is ever stored, and block pairs in which no query sees any key cost nothing
(`live_blocks`).

Forward: for each query block, a loop over its list of live key blocks, with a running softmax.
Backward: for each key block the live query blocks are contiguous (from its own position to the
furthest end), so the loop has no branches and no list.

Glossary: B rows, N tokens, H query heads in KV groups of G, hd head width, nq and nk numbers
of blocks of bq queries and bk keys.  Rows are mapped one after another, since each has a tree
and hence a loop of its own.

Invariant: every token sees itself; padding is `end[j] = j + 1`.
Not a TPU kernel (`tree_attention_tpu`).  Source: FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from clawgym_jax.model.attention import LSE, OUT
from clawgym_jax.model.live_blocks import live_blocks

_LOWEST = -1e30  # below any score, yet finite: differences of two of them are not NaN


def tree_attention(
    q: jax.Array,  # f[B, N, H, hd]
    k: jax.Array,  # f[B, N, KV, hd]
    v: jax.Array,  # f[B, N, KV, hd]
    end: jax.Array,  # i32[B, N]
    block_q: int | None = None,
    block_k: int | None = None,
) -> jax.Array:
    """f[B, N, H, hd]: softmax attention under the tree mask. Blocks default to `blocks_for`."""
    length, heads, groups = q.shape[1], q.shape[2], k.shape[2]
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or end.shape != q.shape[:2]:
        raise ValueError(
            "expected q f[B, N, H, hd], k and v f[B, N, KV, hd], end i32[B, N]; got "
            f"{q.shape}, {k.shape}, {v.shape}, {end.shape}"
        )
    if heads % groups:
        raise ValueError(f"heads: expected a multiple of the {groups} key-value heads, got {heads}")
    likely_q, likely_k = blocks_for(q.shape[-1])
    bk = min(block_k or likely_k, _round_up(length, 8))
    bq = min(block_q or likely_q, _round_up(length, bk))
    padded = _round_up(length, math.lcm(bq, bk))
    extra = padded - length
    tail = jnp.arange(length, padded, dtype=end.dtype) + 1  # padding sees itself
    end = jnp.concatenate([end, jnp.broadcast_to(tail, (end.shape[0], extra))], axis=1)
    q, k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in (q, k, v))
    return _attention(q, k, v, end, bq, bk)[:, :length]


def blocks_for(head_dim: int) -> tuple[int, int]:
    """(queries, keys) of a block. Wide heads repay large products; with narrow ones a block is
    mostly exponentials, and small blocks waste fewer of them (experiments/bench/attention.py)."""
    return (256, 128) if head_dim >= 128 else (64, 64)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, bq: int, bk: int
) -> jax.Array:
    return _forward(q, k, v, end, bq, bk)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, bq: int, bk: int
) -> tuple[jax.Array, Any]:
    groups = k.shape[2]
    qs, ks, vs = _blocks(q, bq, groups), _blocks(k, bk, groups), _blocks(v, bk, groups)
    row = functools.partial(_row_forward, bq=bq, bk=bk)
    out, lse = jax.lax.map(lambda args: row(*args), (qs, ks, vs, end))
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return _unblocks(out, q.shape), (q, k, v, end, out, lse)


def _row_forward(
    q: jax.Array,  # f[nq, KV, G * bq, hd]
    k: jax.Array,  # f[nk, KV, bk, hd]
    v: jax.Array,  # f[nk, KV, bk, hd]
    end: jax.Array,  # i32[N]
    bq: int,
    bk: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one row and the log of each softmax's denominator."""
    live = live_blocks(end, bq, bk)
    counts = jnp.sum(live, axis=1, dtype=jnp.int32)
    orders = jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32)  # live blocks first
    precise = jnp.promote_types(q.dtype, jnp.float32)
    scale = 1.0 / math.sqrt(q.shape[-1])

    def one_block(args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, query, count, order = args

        def step(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            j = order[t]
            seen = _seen(end, index, j, bq, bk, query.shape[1] // bq)
            scores = _dot("gqd,gkd->gqk", query, k[j], precise) * scale
            higher = jnp.maximum(top, jnp.max(jnp.where(seen, scores, _LOWEST), axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
            shrink = jnp.exp(top - higher)
            total = total * shrink + jnp.sum(weights, axis=-1)
            added = _dot("gqk,gkd->gqd", weights.astype(v.dtype), v[j], precise)
            return higher, total, acc * shrink[..., None] + added

        start = (
            jnp.full(query.shape[:2], _LOWEST, precise),
            jnp.zeros(query.shape[:2], precise),
            jnp.zeros(query.shape, precise),
        )
        top, total, acc = jax.lax.fori_loop(0, count, step, start)
        return (acc / total[..., None]).astype(query.dtype), top + jnp.log(total)

    indices = jnp.arange(q.shape[0], dtype=jnp.int32)
    out, lse = jax.lax.map(one_block, (indices, q, counts, orders))
    return out, lse


def _backward(
    bq: int, bk: int, saved: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, end, out, lse = saved
    groups = k.shape[2]
    d_blocks = _blocks(d_out, bq, groups)
    qs, ks, vs = _blocks(q, bq, groups), _blocks(k, bk, groups), _blocks(v, bk, groups)
    delta = jnp.sum(d_blocks.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    row = functools.partial(_row_backward, bq=bq, bk=bk)
    dq, dk, dv = jax.lax.map(lambda args: row(*args), (qs, ks, vs, end, d_blocks, lse, delta))
    return _unblocks(dq, q.shape), _unblocks(dk, k.shape), _unblocks(dv, v.shape), None


def _row_backward(
    q: jax.Array,  # f[nq, KV, G * bq, hd]
    k: jax.Array,  # f[nk, KV, bk, hd]
    v: jax.Array,  # f[nk, KV, bk, hd]
    end: jax.Array,  # i32[N]
    d_out: jax.Array,  # f[nq, KV, G * bq, hd]
    lse: jax.Array,  # f32[nq, KV, G * bq]
    delta: jax.Array,  # f32[nq, KV, G * bq], sum of d_out * out
    bq: int,
    bk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    precise = lse.dtype
    scale = 1.0 / math.sqrt(q.shape[-1])
    reach = jnp.max(end.reshape(-1, bk), axis=1)  # i32[nk]

    def one_block(dq: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
        j, key, value = args

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = carry
            query, upstream = q[i], d_out[i]
            seen = _seen(end, i, j, bq, bk, query.shape[1] // bq)
            scores = _dot("gqd,gkd->gqk", query, key, precise) * scale
            weights = jnp.where(seen, jnp.exp(scores - lse[i][..., None]), 0)
            d_weights = _dot("gqd,gkd->gqk", upstream, value, precise)
            d_scores = (weights * (d_weights - delta[i][..., None]) * scale).astype(q.dtype)
            dv = dv + _dot("gqk,gqd->gkd", weights.astype(q.dtype), upstream, precise)
            dk = dk + _dot("gqk,gqd->gkd", d_scores, query, precise)
            dq = dq.at[i].add(_dot("gqk,gkd->gqd", d_scores, key, precise))
            return dq, dk, dv

        zeros = jnp.zeros(key.shape, precise)
        first, last = j * bk // bq, (reach[j] + bq - 1) // bq  # contiguous live queries
        dq, dk, dv = jax.lax.fori_loop(first, last, step, (dq, zeros, zeros))
        return dq, (dk.astype(key.dtype), dv.astype(value.dtype))

    indices = jnp.arange(k.shape[0], dtype=jnp.int32)
    dq, (dk, dv) = jax.lax.scan(one_block, jnp.zeros(q.shape, precise), (indices, k, v))
    return dq.astype(q.dtype), dk, dv


_attention.defvjp(_forward, _backward)


def _seen(end: jax.Array, i: jax.Array, j: jax.Array, bq: int, bk: int, groups: int) -> jax.Array:
    """bool[1, G * bq, bk]: the mask between query block i and key block j."""
    query = jnp.tile(i * bq + jnp.arange(bq, dtype=jnp.int32), groups)[:, None]
    key = j * bk + jnp.arange(bk, dtype=jnp.int32)
    ends = jax.lax.dynamic_slice_in_dim(end, j * bk, bk)
    return ((key[None, :] <= query) & (query < ends[None, :]))[None]


def _blocks(x: jax.Array, block: int, groups: int) -> jax.Array:
    """f[B, N, H, hd] to f[B, n, KV, G * block, hd]: heads of a group beside each other."""
    rows, length, heads, width = x.shape
    x = x.reshape(rows, length // block, block, groups, heads // groups, width)
    return jnp.transpose(x, (0, 1, 3, 4, 2, 5)).reshape(
        rows, length // block, groups, heads // groups * block, width
    )


def _unblocks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_blocks`."""
    rows, length, heads, width = shape
    number, groups = x.shape[1], x.shape[2]
    block = length // number
    x = x.reshape(rows, number, groups, heads // groups, block, width)
    return jnp.transpose(x, (0, 1, 4, 2, 3, 5)).reshape(shape)


def _dot(spec: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

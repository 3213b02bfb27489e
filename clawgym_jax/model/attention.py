"""Attention over a packed prefix tree, the obvious way: the oracle, and good for short rows.

Tokens of a row stand in depth-first order; `end[j]` is the exclusive end of the subtree below
token j, and token i sees token j iff `j <= i < end[j]`.  A causal row is `end = N`, linear
packing is the end of each sequence, padding is `end[j] = j + 1`: one vector says it all.

Invariant: every token sees at least itself, so no softmax is over nothing.
Not for long rows: memory is N x N per head (`tree_attention` is the blocked twin).
"""

import math

import jax
import jax.numpy as jnp

# What the flash forms save for the backward pass, by name for the policies of jax.checkpoint:
# kept, a rematerialised layer does not compute its attention again.
OUT, LSE = "attention_out", "attention_lse"


def tree_mask(end: jax.Array) -> jax.Array:
    """bool[B, N, N], true where query i (axis 1) may see key j (axis 2)."""
    index = jnp.arange(end.shape[-1], dtype=end.dtype)
    seen = index[None, :] <= index[:, None]  # bool[N, N]
    return seen[None] & (index[None, :, None] < end[:, None, :])


def dense_tree_attention(
    q: jax.Array,  # f[B, N, H, hd]
    k: jax.Array,  # f[B, N, KV, hd]
    v: jax.Array,  # f[B, N, KV, hd]
    end: jax.Array,  # i32[B, N]
) -> jax.Array:
    """f[B, N, H, hd]: softmax attention under the tree mask, in at least float32."""
    batch, length, heads, width = q.shape
    groups = heads // k.shape[2]
    precise = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, length, k.shape[2], groups, width)
    scores = jnp.einsum("bikgd,bjkd->bkgij", grouped, k, preferred_element_type=precise)
    scores = scores / math.sqrt(width)
    mask = tree_mask(end)[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgij,bjkd->bikgd", weights.astype(v.dtype), v)
    return out.reshape(q.shape)

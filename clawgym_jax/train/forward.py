"""A model's forward pass over packed rows, on one device or as the program of one chip of a mesh.

Not here: what is made of the hidden states (`policy`, `critic`).
Invariant: hidden states depend on the rows alone, so every program that reads them sees the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.model.attention_choice import choose_attention
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Output, Qwen3, apply
from clawgym_jax.model.sharding import X


def forward_rows(
    graphdef: nnx.GraphDef[Qwen3],
    attention: str,
    params: Any,
    batch: TreeBatch,
    parallel: Parallel | None = None,
    want_routing: bool = False,
) -> Output:
    """Hidden states of all tokens; with `batch.routes` through the recorded experts (R3)."""
    attend_tree, end = choose_attention(attention), jnp.asarray(batch.end)

    def on_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_tree(q, k, v, end)

    attend_rows = on_rows if parallel is None else parallel.over_heads(on_rows)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return attend_rows(q, k, v), cache

    replay = None
    if batch.routes is not None:  # [R, L, N, k] -> [L, R, N, k]
        replay = jnp.moveaxis(jnp.asarray(batch.routes), 1, 0).astype(jnp.int32)
    tokens, position = jnp.asarray(batch.tokens), jnp.asarray(batch.position)
    return apply(
        graphdef, params, tokens, position, attend, want_routing=want_routing, replay=replay
    )


def own_tokens(parallel: Parallel | None, x: Any, axis: int = 1) -> jax.Array:
    """The part of an array over whole rows that belongs to this chip's hidden states."""
    return jnp.asarray(x) if parallel is None else parallel.mine(jnp.asarray(x), axis)


def over_row(parallel: Parallel | None, x: jax.Array) -> jax.Array:
    """A sum over a chip's tokens as the sum over the whole row, the same on all its chips."""
    if parallel is None:
        return x
    total: jax.Array = jax.lax.psum(x, X)
    return total

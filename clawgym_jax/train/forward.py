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
from clawgym_jax.model.config import Qwen3Config
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
    if parallel is not None:
        replay = _with_padding_spread(nnx.merge(graphdef, params).config, batch, replay)
    tokens, position = jnp.asarray(batch.tokens), jnp.asarray(batch.position)
    return apply(
        graphdef, params, tokens, position, attend, want_routing=want_routing, replay=replay
    )


def _with_padding_spread(
    config: Qwen3Config, batch: TreeBatch, replay: jax.Array | None
) -> jax.Array | None:
    """i32[L, R, N, k]: `replay`, and at padding each expert in turn; -1 = free.

    Padding is the same token everywhere: left to the router, all of it would go to the same few
    experts and fill their chips' buffers. Nobody reads what becomes of it.
    """
    if not config.num_moe_layers:
        return replay
    end, position = jnp.asarray(batch.end), jnp.asarray(batch.position)
    place, top_k = jnp.arange(end.shape[1]), config.num_experts_per_tok
    padding = (position == 0) & (end == place + 1)  # a root that nothing descends from
    turn = (place[:, None] * top_k + jnp.arange(top_k)) % config.num_experts  # i32[N, k]
    if replay is None:
        replay = jnp.full((config.num_moe_layers, *end.shape, top_k), -1, jnp.int32)
    return jnp.where(padding[..., None], turn, replay)


def own_tokens(parallel: Parallel | None, x: Any, axis: int = 1) -> jax.Array:
    """The part of an array over whole rows that belongs to this chip's hidden states."""
    return jnp.asarray(x) if parallel is None else parallel.mine(jnp.asarray(x), axis)


def over_row(parallel: Parallel | None, x: jax.Array) -> jax.Array:
    """A sum over a chip's tokens as the sum over the whole row, the same on all its chips."""
    if parallel is None:
        return x
    total: jax.Array = jax.lax.psum(x, X)
    return total

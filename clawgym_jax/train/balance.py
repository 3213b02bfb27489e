"""The load-balance loss of a mixture on packed trees, and what a replayed route says of the router.

    loss = E / L * sum_l sum_e f_le P_le
    f_le = sum_v W_v [e in top-k of v in layer l] / sum_v W_v      (a constant, of the whole batch)
    P_le = sum_v W_v p_le(v) / sum_v W_v                           (p: softmax of the router)

W_v is `TreeBatch.balance`: what the state at v weighs in the loss. So a tree balances what its
separate paths would; and with f taken over the whole batch beforehand the loss is a plain sum over
tokens, the same however the batch is cut into micro-steps.
Source: Switch Transformer, equations 4 to 6; the shared tree-loss law, where the form without W is
off by half the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.qwen3 import Output
from clawgym_jax.train.forward import over_row, own_tokens


def expert_load(out: Output, batch: TreeBatch, parallel: Parallel | None = None) -> jax.Array:
    """f32[L, E]: weight that each expert gets from these rows; not yet a share."""
    assert out.routing is not None and out.router_logits is not None, "no mixture, or not asked for"
    weight = own_tokens(parallel, batch.balance)  # f32[R, N]
    chosen = jax.nn.one_hot(out.routing, out.router_logits.shape[-1], dtype=jnp.float32)
    return over_row(parallel, jnp.einsum("rn,lrnke->le", weight, chosen))


def balance_loss(
    out: Output, batch: TreeBatch, load: jax.Array, parallel: Parallel | None = None
) -> jax.Array:
    """The share of these rows. load: f / sum W, f32[L, E], of the whole batch."""
    assert out.router_logits is not None, "the load-balance loss needs a mixture of experts"
    weight = own_tokens(parallel, batch.balance)
    probabilities = jax.nn.softmax(out.router_logits.astype(jnp.float32), axis=-1)
    layers, *_, experts = probabilities.shape
    mean = jnp.einsum("rn,lrne->le", weight, probabilities)
    return over_row(parallel, jnp.sum(jax.lax.stop_gradient(load) * mean)) * (experts / layers)


def strayed_routes(
    out: Output, batch: TreeBatch, parallel: Parallel | None = None
) -> tuple[jax.Array, jax.Array]:
    """(replayed experts that the router would not choose now, replayed experts); f32[] each."""
    if batch.routes is None or out.router_logits is None:
        return jnp.zeros(()), jnp.zeros(())
    routes = own_tokens(parallel, jnp.moveaxis(jnp.asarray(batch.routes), 1, 0), axis=2)
    top_k = routes.shape[-1]
    known = routes >= 0
    least = jax.lax.top_k(out.router_logits, top_k)[0][..., -1:]
    scores = jnp.take_along_axis(out.router_logits, jnp.maximum(routes, 0).astype(jnp.int32), -1)
    stray = jnp.sum(known & (scores < least)).astype(jnp.float32)
    return over_row(parallel, stray), over_row(parallel, jnp.sum(known).astype(jnp.float32))

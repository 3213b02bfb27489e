"""Grouped matrix multiplication: rows sorted by group, one matrix per group.

`gmm(x, w, sizes)[i] = x[i] @ w[group of row i]`.  The one seam between the mixture of experts
and the machine:
  blocked   `block_gmm`, a loop over blocks of rows: on CPU and as reference
  megablox  Pallas kernels (`grouped_tpu`): on TPU
  ragged    `jax.lax.ragged_dot`: elsewhere (on CPU it is a dense product over all groups, and on
            some TPUs, too)

The loop needs no padded copy of the rows: blocks are written in order, so what a block writes
beyond its group's end is overwritten by the next one.

Invariant: rows at or beyond `sum(sizes)` come out undefined and get no gradient.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from clawgym_jax.model import grouped_tpu

BLOCK = 128  # rows per multiplication
Kind = Literal["blocked", "megablox", "ragged"]


def kind_for(platform: str) -> Kind:
    """What suits a platform as jax names it."""
    kinds: dict[str, Kind] = {"cpu": "blocked", "tpu": "megablox"}
    return kinds.get(platform, "ragged")


def gmm(
    x: jax.Array,  # f[M, D], sorted by group
    w: jax.Array,  # f[E, D, F]
    sizes: jax.Array,  # i32[E], rows of each group
    kind: Kind | None = None,
) -> jax.Array:
    """f[M, F]; without a kind, by the form that suits the platform and needs no kernel."""
    out: jax.Array
    if kind == "blocked":
        out = block_gmm(x, w, sizes)
    elif kind == "megablox":
        out = grouped_tpu.kernel_gmm(x, w, sizes)
    elif kind == "ragged":
        out = jax.lax.ragged_dot(x, w, sizes)
    else:
        out = jax.lax.platform_dependent(
            x, w, sizes, cpu=block_gmm, default=lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes)
        )
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def block_gmm(x: jax.Array, w: jax.Array, sizes: jax.Array, block: int = BLOCK) -> jax.Array:
    """`gmm` as a loop over blocks of at most `block` rows of one group."""
    return _forward(x, w, sizes, block)


def _plan(sizes: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Number of blocks, and for each block its group i32[B] and its first row i32[B]."""
    groups = sizes.shape[0]
    most = rows // block + groups  # static bound
    per_group = (sizes + block - 1) // block
    first_block = jnp.cumsum(per_group) - per_group
    first_row = jnp.cumsum(sizes) - sizes
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(jnp.cumsum(per_group), index, side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    start = first_row[group] + (index - first_block[group]) * block
    return jnp.sum(per_group), group, start.astype(jnp.int32)


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
    rows = x.shape[0]
    count, group, start = _plan(sizes, block, rows)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(padded, start[i], block)
        product = jnp.dot(part, w[group[i]], preferred_element_type=out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, product, start[i], axis=0)

    out: jax.Array = jnp.zeros((rows + block, w.shape[2]), x.dtype)
    out = jax.lax.fori_loop(0, count, body, out)
    return out[:rows]


def _weight_gradient(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, block: int, like: jax.Array
) -> jax.Array:
    """f[E, D, F]: per group, x^T dy over its rows."""
    count, group, start = _plan(sizes, block, x.shape[0])
    stop = jnp.cumsum(sizes)
    x, dy = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, dy))

    def body(i: jax.Array, dw: jax.Array) -> jax.Array:
        rows = start[i] + jnp.arange(block)
        part = jax.lax.dynamic_slice_in_dim(x, start[i], block)
        part = jnp.where((rows < stop[group[i]])[:, None], part, 0)
        seen = jax.lax.dynamic_slice_in_dim(dy, start[i], block)
        return dw.at[group[i]].add(jnp.dot(part.T, seen, preferred_element_type=dw.dtype))

    precise = jnp.promote_types(like.dtype, jnp.float32)
    dw: jax.Array = jax.lax.fori_loop(0, count, body, jnp.zeros(like.shape, precise))
    return dw.astype(like.dtype)


def _vjp_forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _forward(x, w, sizes, block), (x, w, sizes)


def _vjp_backward(
    block: int, saved: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    dx = _forward(dy, jnp.swapaxes(w, 1, 2), sizes, block)
    inside = jnp.arange(x.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], dx, 0), _weight_gradient(x, dy, sizes, block, w), None


block_gmm.defvjp(_vjp_forward, _vjp_backward)

"""Grouped matrix multiplication on TPU: JAX's Pallas kernels (megablox) with a tiling for experts.

The kernels visit the row tiles that hold rows, and a tile on the border of two groups once for
each. So the work beyond the ideal is one row tile per border: tiles of rows are chosen small enough
to keep that within a few percent. The other two axes are taken whole where they fit, so that a
group's matrix is read once, not once per row tile.

Invariant: as `grouped.gmm`; rows at or beyond `sum(sizes)` come out undefined, with no gradient.
Source: jax.experimental.pallas.ops.tpu.megablox (MegaBlocks, https://arxiv.org/abs/2211.15841).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

_WASTE = 0.025  # of a buffer's rows that borders may cost: 5 % of the work, as it is half full
_LANES = 128
_DEPTH, _MATRIX, _GRADIENT = 2048, 2048 * 768, 1024 * 768  # what fits in 16 MiB beside its copies


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def kernel_gmm(
    x: jax.Array,  # f[M, D], sorted by group
    w: jax.Array,  # f[E, D, F]
    sizes: jax.Array,  # i32[E]
    interpret: bool = False,  # run the kernels' meaning on a CPU: for tests
) -> jax.Array:
    """f[M, F], in x's type."""
    return _multiply(x, w, sizes, False, interpret)


def row_tile(rows: int, groups: int) -> int:
    """Rows of a tile: the largest of 512, 256, 128 that keeps the borders' cost small."""
    if rows < _LANES:
        return -(-rows // 16) * 16
    fitting = [tile for tile in (512, 256) if tile * groups <= _WASTE * rows]
    return fitting[0] if fitting else _LANES


def _multiply(
    x: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool, interpret: bool
) -> jax.Array:
    rows, depth = x.shape
    tile = row_tile(rows, w.shape[0])
    depth = _divisor(depth, _DEPTH)
    width = _divisor(w.shape[1 if transposed else 2], _MATRIX // depth)
    out: jax.Array = gmm(
        _padded(x, tile), w, sizes, x.dtype, (tile, depth, width),
        transpose_rhs=transposed, interpret=interpret,
    )  # fmt: skip
    return out[:rows]


def _weight_gradient(
    x: jax.Array, upstream: jax.Array, sizes: jax.Array, like: jax.Array, interpret: bool
) -> jax.Array:
    tile = row_tile(x.shape[0], like.shape[0])
    width = _divisor(like.shape[2], _DEPTH)
    depth = _divisor(like.shape[1], _GRADIENT // width)
    out: jax.Array = tgmm(
        _padded(x, tile).T, _padded(upstream, tile), sizes, like.dtype, (tile, depth, width),
        interpret=interpret,
    )  # fmt: skip
    return out


def _padded(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))


def _divisor(size: int, most: int) -> int:
    """The largest multiple of 128 that divides `size` and is at most `most`, else `size`."""
    if size <= most:
        return size
    fitting = [d for d in range(_LANES, most + 1, _LANES) if size % d == 0]
    return fitting[-1] if fitting else size


Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, interpret: bool
) -> tuple[jax.Array, Saved]:
    return kernel_gmm(x, w, sizes, interpret), (x, w, sizes)


def _backward(
    interpret: bool, saved: Saved, upstream: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    dx = _multiply(upstream, w, sizes, True, interpret)
    inside = jnp.arange(x.shape[0]) < jnp.sum(sizes)
    dw = _weight_gradient(x, upstream, sizes, w, interpret)
    return jnp.where(inside[:, None], dx, 0), dw, None


kernel_gmm.defvjp(_forward, _backward)

"""Two collectives over tokens, each the other's transpose.

They are jax's `all_gather` and `psum_scatter` with the chips as an axis of their own in between:
written on the axis of tokens itself, the TPU compiler makes the sum an all-reduce of everything:
twice the bytes.
Invariant: `gather` of what `scatter_sum` gave is the sum over chips, on every chip.
"""

import jax
import jax.numpy as jnp


def gather(x: jax.Array, over: str, axis: int) -> jax.Array:
    """All chips' parts one after another along `axis`."""
    parts = jnp.moveaxis(jax.lax.all_gather(x, over), 0, axis)  # [..., X, n, ...]
    return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def scatter_sum(x: jax.Array, over: str, axis: int) -> jax.Array:
    """This chip's part along `axis` of the sum over all chips."""
    chips = jax.lax.axis_size(over)
    parts = x.reshape(*x.shape[:axis], chips, -1, *x.shape[axis + 1 :])
    mine: jax.Array = jax.lax.psum_scatter(jnp.moveaxis(parts, axis, 0), over, scatter_dimension=0)
    return mine

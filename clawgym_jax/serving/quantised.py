"""Keys or values as they are kept: an array in the model's type, or 8-bit integers with scales.

One scale for each vector (a head's, of a token): max|x| / 127, so that an entry is off by at most
half a scale. Attention multiplies the integers as they are and the scales into scores and weights;
what is kept is never written out in another type.

A token's key and value are made integers as soon as they are computed; its own query, its chunk and
all that follows attend to those. So what a token gets does not depend on how its context came into
its slot (one chunk or several, steps, another slot, the pool): all hold the same integers. Only an
entry within rounding of the middle between two integers may come out as the other one where another
program computed it: cold and cached differ by rounding, or, seldom, by a scale in one entry.
Not here: where they lie (`pieces`), what attention computes (`attention`).
Axes: hd head width, always last; t tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = 127  # of the integers; -128 is not used


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ints", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Int8:
    """Vectors ints * scale; indexed like an array, but never along the last axis."""

    ints: jax.Array  # i8[..., hd]
    scale: jax.Array  # f32[...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ints.shape

    def __getitem__(self, index: Any) -> Int8:
        return Int8(self.ints[index], self.scale[index])


Kept = jax.Array | Int8


def quantise(x: jax.Array) -> Int8:
    """The nearest integers, for vectors f[..., hd].

    Zero stays zero; a vector that is not finite has a scale that is not.
    """
    precise = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(precise), axis=-1) / LARGEST
    ratio = precise / jnp.where(scale == 0, 1, scale)[..., None]
    return Int8(jnp.clip(jnp.round(ratio), -LARGEST, LARGEST).astype(jnp.int8), scale)


def kept_as(like: Kept, x: jax.Array) -> Kept:
    """`x` as `like` is kept."""
    return quantise(x) if isinstance(like, Int8) else x


def zeros(shape: tuple[int, ...], dtype: Any) -> Kept:
    """Nothing yet; int8 asks for integers with scales."""
    if dtype == jnp.int8:
        return Int8(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def token_bytes(width: int, dtype: Any) -> int:
    """Of one vector."""
    kept = jax.eval_shape(lambda: zeros((width,), dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def numbers(kept: Kept, dtype: Any) -> jax.Array:
    """What products take: integers (exact in `dtype`), or the array itself."""
    return kept.ints.astype(dtype) if isinstance(kept, Int8) else kept


def scaled(x: jax.Array, kept: Kept) -> jax.Array:
    """Scores or weights f32[b, KV, ..., t] of `kept` f[b, KV, t, hd] times its scales, if any."""
    if not isinstance(kept, Int8):
        return x
    between = range(2, x.ndim - 1)
    return x * jnp.expand_dims(kept.scale, tuple(between))


def read(kept: Kept) -> jax.Array:
    """The vectors themselves, f32 from integers; for a few tokens."""
    return kept.ints * kept.scale[..., None] if isinstance(kept, Int8) else kept


def slice_of(kept: Kept, at: tuple[Any, ...], size: tuple[int, ...]) -> Kept:
    """`size` entries from `at` on, of all axes but the last."""

    def one(leaf: jax.Array) -> jax.Array:
        rest = leaf.shape[len(at) :]
        return jax.lax.dynamic_slice(leaf, (*at, *(0 for _ in rest)), (*size, *rest))

    part: Kept = jax.tree.map(one, kept)
    return part


def with_slice(kept: Kept, part: Kept, at: tuple[Any, ...]) -> Kept:
    """With `part` from `at` on, of all axes but the last."""

    def one(leaf: jax.Array, part: jax.Array) -> jax.Array:
        rest = (0 for _ in leaf.shape[len(at) :])
        return jax.lax.dynamic_update_slice(leaf, part, (*at, *rest))

    written: Kept = jax.tree.map(one, kept, part)
    return written


def with_entries(kept: Kept, new: Kept, at: Any, mode: str | None = None) -> Kept:
    """With `new` at an index of all axes but the last. mode: as of `jax.Array.at`."""
    written: Kept = jax.tree.map(lambda leaf, x: leaf.at[at].set(x, mode=mode), kept, new)
    return written

"""Keys and values in pieces against the same in one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.serving import pieces
from clawgym_jax.serving.programs import scatter, write_rows

SHAPE = (3, 5, 2, 24, 4)  # layers, slots and scratch, heads, tokens, width
CUTS = [[24], [8, 24], [5, 6, 20, 24]]


def some(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def both(edges: list[int]) -> tuple[jax.Array, pieces.Cache]:
    """An array, and its pieces."""
    whole = some(*SHAPE)
    cut = pieces.put(pieces.empty(SHAPE, jnp.float32, edges), whole, np.arange(5), scatter)
    return whole, cut


def assert_same(cut: pieces.Cache, whole: Any) -> None:
    np.testing.assert_array_equal(pieces.take(cut, np.arange(5), 24), whole)


@pytest.mark.parametrize("edges", CUTS)
def test_a_cut_holds_what_the_array_holds(edges: list[int]) -> None:
    whole, cut = both(edges)
    assert_same(cut, whole)
    assert (pieces.tokens(cut), pieces.layers(cut)) == (24, 3)
    slots = np.array([3, 0, 3])
    for bucket in (1, 5, 17, 24):
        np.testing.assert_array_equal(pieces.take(cut, slots, bucket), whole[:, slots, :, :bucket])
        np.testing.assert_array_equal(pieces.take_one(cut, 2, bucket), whole[:, 2:3, :, :bucket])


@pytest.mark.parametrize("edges", CUTS)
def test_beginnings_of_slots_are_written(edges: list[int]) -> None:
    whole, cut = both(edges)
    new = some(3, 1, 2, 17, 4, seed=1)
    expected = whole.at[:, 3:4, :, :17].set(new)
    assert_same(pieces.put_one(cut, new, 3), expected)
    assert_same(pieces.put(cut, new, np.array([3]), write_rows), expected)


@pytest.mark.parametrize("edges", CUTS)
def test_a_token_of_every_slot_is_written_at_its_place(edges: list[int]) -> None:
    whole, cut = both(edges)
    new, rows, position = some(3, 4, 2, 1, 4, seed=1), np.arange(4), np.array([0, 5, 19, 7])
    expected = whole
    for slot, at in zip(rows, position, strict=True):
        expected = expected.at[:, slot, :, at].set(new[:, slot, :, 0])
    assert_same(pieces.put_token(cut, new, rows, position, 20, scatter), expected)
    uncut = pieces.put_token(((whole,),), new, rows, position, 20, write_rows)
    np.testing.assert_array_equal(uncut[0][0], expected)


@pytest.mark.parametrize("edges", CUTS)
def test_a_chunk_is_written_where_it_starts_and_never_past_the_end(edges: list[int]) -> None:
    whole, cut = both(edges)
    new = some(3, 2, 6, 2, 4, seed=1)  # f[L, b, P, KV, hd]
    expected = whole
    for row, (slot, start) in enumerate(((4, 3), (1, 20))):  # the second has four of six
        count = min(6, 24 - start)
        part = new[:, row, :count].swapaxes(1, 2)
        expected = expected.at[:, slot, :, start : start + count].set(part)
    assert_same(pieces.put_chunk(cut, new, np.array([4, 1]), np.array([3, 20]), 20), expected)

"""Prefill attention in blocks against the plain form, and against keys that must not matter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.serving.attention import (
    attend_chunk,
    attend_chunk_by_block,
    attend_step,
    attend_step_by_block,
)

QUERIES, KEYS = 5, 37


def some(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def inputs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    starts = jnp.array([0, 7, 31])
    position = starts[:, None] + jnp.arange(QUERIES)[None]
    return some((3, QUERIES, 4, 6), 0), some((3, 2, KEYS, 6), 1), some((3, 2, KEYS, 6), 2), position


@pytest.mark.parametrize("block", [1, 4, 8, 36])
def test_blocks_change_nothing(block: int) -> None:
    plain = attend_chunk(*inputs(), block=KEYS)
    blocked = jax.jit(attend_chunk, static_argnames="block")(*inputs(), block=block)
    np.testing.assert_allclose(blocked, plain, atol=2e-6)


@pytest.mark.parametrize("block", [4, KEYS])
def test_keys_behind_a_query_do_not_matter(block: int) -> None:
    q, k, v, position = inputs()
    behind = jnp.arange(KEYS)[None, None, :, None] > position[:, -1, None, None, None]
    other = attend_chunk(
        q, jnp.where(behind, 1e3, k), jnp.where(behind, -1e3, v), position, block=block
    )
    np.testing.assert_array_equal(other, attend_chunk(q, k, v, position, block=block))


def test_grouped_heads_share_their_keys() -> None:
    q, k, v, position = inputs()
    spread = [jnp.repeat(x, 2, axis=1) for x in (k, v)]
    blocked = attend_chunk(q, k, v, position, block=8)
    np.testing.assert_allclose(blocked, attend_chunk(q, *spread, position, block=8), atol=2e-6)


def head_by_head(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """f[H, hd] for q f[H, hd], keys and values f[KV, T, hd]: the definition."""
    group = q.shape[0] // keys.shape[0]
    outs = []
    for head in range(q.shape[0]):
        scores = keys[head // group] @ q[head] / np.sqrt(q.shape[1])
        outs.append(jax.nn.softmax(scores) @ values[head // group])
    return jnp.stack(outs)


def in_blocks(q: Any, k: Any, v: Any, past_k: Any, past_v: Any, mask: Any) -> jax.Array:
    cuts = [1, 20]
    past = (jnp.split(x, cuts, axis=2) for x in (past_k, past_v))
    return attend_step_by_block(q, k, v, *past, mask)


@pytest.mark.parametrize("block", [3, 64])
def test_a_chunk_is_attention_over_blocks_of_the_past_and_itself(block: int) -> None:
    q, past_k, past_v, position = inputs()
    starts = position[:, 0]
    rows = jnp.arange(3)[:, None]
    k, v = (x[rows, :, position] for x in (past_k, past_v))  # f[b, P, KV, hd]
    plain = attend_chunk(q, past_k, past_v, position, block=KEYS)
    hidden = jnp.arange(KEYS)[None, None, :, None] >= starts[:, None, None, None]
    blocks = (jnp.split(jnp.where(hidden, 1e3, x), [7, 30], axis=2) for x in (past_k, past_v))
    got = jax.jit(attend_chunk_by_block, static_argnames="block")(
        q, k, v, *blocks, starts, block=block
    )
    np.testing.assert_allclose(got, plain, atol=2e-6)


@pytest.mark.parametrize("form", [attend_step, in_blocks])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_step_is_attention_over_the_past_and_itself(groups: int, form: Any) -> None:
    q, k, v = some((3, 1, 4, 6), 0), some((3, 1, groups, 6), 1), some((3, 1, groups, 6), 2)
    past_k, past_v = some((3, groups, KEYS, 6), 3), some((3, groups, KEYS, 6), 4)
    lengths = np.array([0, 5, KEYS])
    mask = jnp.arange(KEYS)[None, :] < lengths[:, None]
    got = form(q, k, v, past_k, past_v, mask)
    for slot, length in enumerate(lengths):
        keys, values = (
            jnp.concatenate([past[slot, :, :length], new[slot].swapaxes(0, 1)], axis=1)
            for past, new in ((past_k, k), (past_v, v))
        )
        expected = head_by_head(q[slot, 0], keys, values)
        np.testing.assert_allclose(got[slot, 0], expected, atol=2e-6)
    spoilt = jnp.where(mask[:, None, :, None], past_k, 1e3)  # what the mask hides does not matter
    np.testing.assert_array_equal(got, form(q, k, v, spoilt, past_v, mask))

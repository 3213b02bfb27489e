"""The collectives of one chip's program, chips being an axis of `vmap`: seams against no mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.parallel import MeshConfig, Parallel
from clawgym_jax.model.sharding import X

CHIPS, B, N, HD = 4, 2, 16, 8
PARALLEL = Parallel(AbstractMesh((1, CHIPS), ("fsdp", X)))  # type: ignore[arg-type]


def cut(x: jax.Array, axis: int) -> jax.Array:
    return jnp.stack(jnp.split(x, CHIPS, axis))


def joined(x: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate(list(x), axis)


@pytest.mark.parametrize("kv_heads", [2, 4, 8])  # repeated, one each, several each
def test_attention_over_heads_is_attention(kv_heads: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, N, 8, HD))
    k, v = (jax.random.normal(key, (B, N, kv_heads, HD)) for key in keys[1:3])
    upstream = jax.random.normal(keys[3], q.shape)
    end = jnp.full((B, N), N, jnp.int32)

    def whole(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dense_tree_attention(q, k, v, end)

    @jax.jit
    def twin(upstream: jax.Array) -> Any:
        out, backward = jax.vjp(whole, q, k, v)
        return out, backward(upstream)

    def chip(q: jax.Array, k: jax.Array, v: jax.Array, upstream: jax.Array) -> Any:
        out, backward = jax.vjp(PARALLEL.over_heads(whole), q, k, v)
        return out, backward(upstream)

    cuts = (cut(x, 1) for x in (q, k, v, upstream))
    found = jax.jit(jax.vmap(chip, axis_name=X))(*cuts)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(twin(upstream)), strict=True):
        np.testing.assert_allclose(joined(got, 1), wanted, atol=1e-6)


def test_look_up_is_indexing() -> None:
    table = jax.random.normal(jax.random.key(0), (12, 6))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (B, N)), jnp.int32)
    upstream = jax.random.normal(jax.random.key(1), (B, N, 6))
    gradient = jnp.zeros_like(table).at[tokens].add(upstream)

    def chip(table: jax.Array, upstream: jax.Array) -> Any:
        def look_up(table: jax.Array) -> jax.Array:
            return PARALLEL.look_up(table, tokens, jnp.float32)

        out, backward = jax.vjp(look_up, table)
        return out, backward(upstream)[0]

    both = jax.jit(jax.vmap(jax.vmap(chip, axis_name=X), axis_name="fsdp"))
    out, grad = both(cut(table, 0)[None], cut(upstream, 1)[None])
    np.testing.assert_allclose(joined(out[0], 1), table[tokens], atol=1e-6)
    np.testing.assert_allclose(joined(grad[0], 0), gradient, atol=1e-6)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows of 10 tokens do not divide by x=4"):
        PARALLEL.mine(jnp.zeros((1, 10)))


@pytest.mark.parametrize("wrong", [{"fsdp": -1}, {"x": 0}, {"expert_buffer": 0.5}])
def test_a_wrong_mesh_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mesh: expected"):
        MeshConfig(**wrong)


def test_no_mesh_is_none() -> None:
    assert Parallel.make(MeshConfig()) is None

"""The dense oracle against JAX's own attention, and the meaning of the tree mask."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

from clawgym_jax.model import attention
from tests.model import forests


def test_mask_is_the_ancestor_relation() -> None:
    parents = [-1, 0, 1, 1, 0, -1, 5, -1]
    mask = np.asarray(attention.tree_mask(jnp.asarray(forests.end_of(parents))[None])[0])
    for i in range(len(parents)):
        ancestors, token = set(), i
        while token >= 0:
            ancestors.add(token)
            token = parents[token]
        assert set(np.flatnonzero(mask[i])) == ancestors


@settings(max_examples=20)
@given(end=forests.forests(24))
def test_oracle_equals_jax_attention(end: np.ndarray) -> None:
    q, k, v = _inputs()
    expected = _theirs(q, k, v, jnp.asarray(end))
    np.testing.assert_allclose(_ours(q, k, v, jnp.asarray(end)), expected, atol=1e-5)


def _inputs() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (2, 24, heads, 8))
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    )


_ours = jax.jit(attention.dense_tree_attention)


@jax.jit
def _theirs(q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=attention.tree_mask(end)[:, None])

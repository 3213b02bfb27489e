"""What the model promises beyond parity: no coupling, one file for training and serving."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from clawgym_jax.model import attention, qwen3, tree_attention
from clawgym_jax.model import config as model_config
from tests.model import forests

CONFIG = model_config.TINY.replace(vocab_size=64, num_layers=3, mlp_only_layers=(0,))
LENGTH = 24


@functools.cache
def _model() -> tuple[nnx.GraphDef[qwen3.Qwen3], nnx.State]:
    graphdef, params = qwen3.init(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    noise = lambda x: x + jnp.asarray(0.08 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return graphdef, jax.tree.map(noise, params)


def _attend_tree(end: jax.Array) -> qwen3.Attend:
    return lambda q, k, v, _: (attention.dense_tree_attention(q, k, v, end), None)


@functools.partial(jax.jit, static_argnames="want_routing")
def _run(
    params: nnx.State,
    tokens: jax.Array,
    positions: jax.Array,
    end: jax.Array,
    replay: jax.Array | None = None,
    want_routing: bool = True,
) -> qwen3.Output:
    graphdef, _ = _model()
    attend = _attend_tree(end)
    return qwen3.apply(graphdef, params, tokens, positions, attend, None, want_routing, replay)


def _causal(tokens: jax.Array, **options: Any) -> qwen3.Output:
    end = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return _run(_model()[1], tokens, positions, end, **options)


def _tokens(seed: int = 1, rows: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, LENGTH), 0, CONFIG.vocab_size)


def test_shapes_and_optional_outputs() -> None:
    plain, full = _causal(_tokens(), want_routing=False), _causal(_tokens())
    assert plain.hidden.shape == (2, LENGTH, CONFIG.hidden_size)
    assert plain.cache is None and plain.routing is None
    assert full.router_logits is not None and full.routing is not None
    assert full.router_logits.shape == (2, 2, LENGTH, CONFIG.num_experts)
    assert full.routing.shape == (2, 2, LENGTH, CONFIG.num_experts_per_tok)
    best = np.argmax(full.router_logits, axis=-1)
    np.testing.assert_array_equal(full.routing[..., 0], best)


def test_later_tokens_and_other_rows_change_nothing() -> None:
    tokens = _tokens()
    changed = tokens.at[0, 12:].set(5).at[1].set(7)
    before, after = _causal(tokens).hidden, _causal(changed).hidden
    np.testing.assert_allclose(before[0, :12], after[0, :12], atol=2e-6)
    assert float(jnp.max(jnp.abs(before[0, 12:] - after[0, 12:]))) > 1e-2


def test_a_tree_equals_its_paths() -> None:
    """Each root-to-leaf path, run alone, gives the hidden states of the packed tree."""
    parents = forests.grow(np.random.default_rng(3), 2 * LENGTH, 0, 0.2)[:LENGTH]
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    ends = jnp.asarray(np.stack([forests.end_of(parents)] * 2))
    tokens = jnp.tile(_tokens()[:1], (2, 1))
    tree = _run(_model()[1], tokens, jnp.asarray([depth, depth]), ends)
    for leaf in sorted(set(range(LENGTH)) - set(parents)):
        path, token = [], leaf
        while token >= 0:
            path.append(token)
            token = parents[token]
        path.reverse()
        padded = np.array(path + [leaf] * (LENGTH - len(path)))  # one shape, one program
        alone = _causal(tokens[:, padded]).hidden[0, : len(path)]
        np.testing.assert_allclose(tree.hidden[0, np.array(path)], alone, atol=1e-5)


def test_blocked_attention_gives_the_same_gradients() -> None:
    graphdef, params = _model()
    end = forests.end_of(forests.grow(np.random.default_rng(0), LENGTH, 2, 0.2))
    ends = jnp.asarray(np.stack([end, end]))
    positions = jnp.zeros_like(ends)

    def total(params: nnx.State, attend: qwen3.Attend) -> jax.Array:
        out = qwen3.apply(graphdef, params, _tokens(), positions, attend)
        return jnp.mean(jnp.square(qwen3.apply_logits(graphdef, params, out.hidden)))

    def blocks(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return tree_attention.tree_attention(q, k, v, ends, 8, 8), None

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    blocked, dense = gradient(params, blocks), gradient(params, _attend_tree(ends))
    for a, b in zip(jax.tree.leaves(blocked), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 + 1e-5 * float(jnp.max(jnp.abs(b))))


def test_decoding_with_a_cache_equals_the_whole_row() -> None:
    """`attend` may return only the new keys and values; the caller writes them in place."""
    graphdef, params = _model()
    tokens = _tokens()
    shape = (CONFIG.num_layers, 2, LENGTH, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache = {"k": jnp.zeros(shape), "v": jnp.zeros(shape)}

    @jax.jit
    def step(cache: Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, old: Any) -> tuple[jax.Array, Any]:
            keys = jax.lax.dynamic_update_slice_in_dim(old["k"], k, position, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(old["v"], v, position, axis=1)
            mask = (jnp.arange(LENGTH) <= position)[None, None, None]
            out = jax.nn.dot_product_attention(q, keys, values, mask=mask)
            return out, {"k": k, "v": v}

        positions = jnp.full((2, 1), position)
        out = qwen3.apply(graphdef, params, token[:, None], positions, attend, cache)
        new = jax.tree.map(
            lambda c, x: jax.lax.dynamic_update_slice_in_dim(c, x, position, axis=2),
            cache,
            out.cache,
        )
        return out.hidden[:, 0], new

    expected = _causal(tokens).hidden
    for i in range(LENGTH):
        hidden, cache = step(cache, tokens[:, i], jnp.int32(i))
        np.testing.assert_allclose(hidden, expected[:, i], atol=1e-5)


@pytest.mark.parametrize("remat", ["products", "attention", "layers"])
def test_remat_changes_no_gradient(remat: qwen3.Remat) -> None:
    graphdef, params = _model()
    remat_graph, _ = qwen3.abstract(CONFIG, remat)
    tokens = _tokens()
    end = jnp.full(tokens.shape, LENGTH, jnp.int32)

    def total(params: nnx.State, graph: nnx.GraphDef[qwen3.Qwen3]) -> jax.Array:
        out = qwen3.apply(graph, params, tokens, jnp.zeros_like(tokens), _attend_tree(end))
        return jnp.mean(jnp.sin(out.hidden))

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    plain, again = gradient(params, graphdef), gradient(params, remat_graph)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_replaying_the_models_own_routes_changes_nothing_and_others_do() -> None:
    first = _causal(_tokens())
    assert first.routing is not None
    again = _causal(_tokens(), replay=first.routing)
    np.testing.assert_allclose(again.hidden, first.hidden, atol=1e-6)
    unknown = first.routing.at[:, :, LENGTH // 2 :].set(-1)  # no record: routed as usual
    np.testing.assert_allclose(_causal(_tokens(), replay=unknown).hidden, first.hidden, atol=1e-6)
    other = (first.routing + 1) % CONFIG.num_experts
    forced = _causal(_tokens(), replay=other)
    np.testing.assert_array_equal(forced.routing, other)
    assert float(jnp.max(jnp.abs(forced.hidden - first.hidden))) > 1e-3


def test_init_matches_abstract_and_is_a_plain_pytree() -> None:
    _, params = qwen3.init(CONFIG, jax.random.key(0))
    _, shapes = qwen3.abstract(CONFIG)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(params)) == [
        x.shape for x in jax.tree.leaves(shapes)
    ]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_float32_from_bfloat16_states(tied: bool) -> None:
    config = CONFIG.replace(tie_word_embeddings=tied, dtype=jnp.bfloat16)
    graphdef, params = qwen3.init(config, jax.random.key(0))
    hidden = jnp.ones((2, 3, config.hidden_size), jnp.bfloat16)
    logits = qwen3.apply_logits(graphdef, params, hidden)
    assert logits.shape == (2, 3, config.vocab_size) and logits.dtype == jnp.float32

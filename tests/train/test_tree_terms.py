"""Further terms of the loss on trees against separate paths, in fp64: path sums, values, balance.

As in test_tree_loss the twins know nothing of trees: every call is a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.batch.config import PATH_SUM, BatchConfig
from clawgym_jax.batch.from_episodes import build_batch
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.losses.advantage import GroupConfig
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.qwen3 import apply, apply_logits, init
from clawgym_jax.train.balance import balance_loss, expert_load
from clawgym_jax.train.critic import CriticConfig, init_critic, trunk_config, value_sums
from clawgym_jax.train.forward import forward_rows
from clawgym_jax.train.policy import LossConfig, loss_sums
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig
from tests.batch.test_from_episodes import episode
from tests.train.test_tree_loss import gradient_error
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
PACK = PackConfig(row_tok=256, train_tok=64)
MODEL = Qwen3Config(
    vocab_size=11, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
    dtype=np.dtype("float64"), param_dtype=np.dtype("float64"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    graphdef, params = init(MODEL, jax.random.key(0))
    return graphdef, jax.tree.map(lambda x: 4.0 * x if x.ndim > 2 else x, params)


def forked_calls(name: str, salt: int):
    """A first call, two turns that extend it, one of them extended again, one with two leaves."""
    calls = [make_call(0, [1, 2, salt], [5, 6], episode=name)]
    first = [1, 2, salt, 5, 6]
    calls.append(make_call(1, [*first, 7], [8, 3], episode=name, continues=(f"{name}.0",)))
    calls.append(make_call(2, [*first, 9], [4], episode=name, continues=(f"{name}.0",)))
    calls.append(make_call(3, [*first, 7, 8, 3, 10], [2], episode=name))
    calls.append(make_call(4, [*first, 7, 8, 3, 9], [1, 6], episode=name))
    return calls


def batch_of(weighting: str):
    """Two groups of two rollouts; (arrays of the one part, episodes)."""
    episodes = [
        episode(f"e{i}", forked_calls(f"e{i}", i), reward, group=f"g{i // 2}")
        for i, reward in enumerate((1.0, 0.0, 0.25, 0.75))
    ]
    config = BatchConfig(
        pack=PACK, filters=KEEP_ALL, weighting=weighting, group=GroupConfig(scale_by_std=False)
    )
    ((part,),), _ = build_batch(episodes, config)
    return part.arrays, episodes


def causal_row(graphdef, params, ids: np.ndarray, want_routing: bool = False):
    """The model on a plain causal row."""
    n = len(ids)
    end = jnp.full((1, n), n, jnp.int32)

    def attend(q, k, v, cache):
        return dense_tree_attention(q, k, v, end), cache

    rows = jnp.asarray(ids)[None], jnp.arange(n)[None]
    return apply(graphdef, params, *rows, attend, want_routing=want_routing)


def path_logprobs(graphdef, params, ids: np.ndarray) -> jax.Array:
    """f64[n - 1]: log-probs of ids[1:] in a plain causal row."""
    hidden = causal_row(graphdef, params, ids).hidden
    logprobs = jax.nn.log_softmax(apply_logits(graphdef, params, hidden)[0, :-1])
    return jnp.take_along_axis(logprobs, jnp.asarray(ids)[1:, None], -1)[:, 0]


def test_path_sums_train_every_path_separately(model) -> None:
    """W = leaves below: each root-to-leaf path as a linear sample of its own, all turns trained."""
    graphdef, params = model
    batch, episodes = batch_of(PATH_SUM)
    loss = LossConfig(clip_low=10.0, clip_high=10.0, logit_chunk=64, attention="dense")
    paths = [(0, 1, 3), (0, 1, 4), (0, 2)]  # of each rollout, by ordinal
    advantage = {0: 0.5, 1: -0.5, 2: -0.25, 3: 0.25}

    def twin(params):
        total = 0.0
        for number, one in enumerate(episodes):
            for path in paths:
                leaf = one.calls[path[-1]]
                ids = np.concatenate([leaf.prompt_ids, leaf.completion.ids])
                logprobs = path_logprobs(graphdef, params, ids)
                for ordinal in path:
                    call = one.calls[ordinal]
                    start = call.prompt_tok - 1
                    new = logprobs[start : start + call.completion_tok]
                    ratio = jnp.exp(new - call.completion.logprobs)
                    total += advantage[number] * jnp.sum(ratio) / len(episodes)
        return -total

    value, grads = jax.value_and_grad(lambda p: loss_sums(graphdef, loss, p, batch)[0])(params)
    expected, wanted = jax.value_and_grad(twin)(params)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-6)
    assert gradient_error(wanted, grads) < 1e-6
    once, _ = batch_of("rollout_mean")
    other = jax.grad(lambda p: loss_sums(graphdef, loss, p, once)[0])(params)
    assert gradient_error(wanted, other) > 0.1, "count-once taken for the path sum must show"


def test_values_on_trees_are_values_on_paths(model) -> None:
    """V is read at the state before the token; siblings that share it keep a target each."""
    _, params = model
    batch, episodes = batch_of("rollout_mean")
    graphdef, _ = init(trunk_config(MODEL), jax.random.key(0))
    critic = init_critic(MODEL, params)
    critic["value"] = jnp.asarray(np.random.default_rng(0).normal(size=MODEL.hidden_size))
    critic["bias"] = jnp.asarray(0.3)
    rng = np.random.default_rng(1)
    returns = np.where(batch.mask, rng.uniform(size=batch.mask.shape), 0.0)
    batch = batch.replace(returns=returns, old_values=np.zeros_like(returns))
    config = CriticConfig(attention="dense")
    target = {}  # by (rollout's salt, ordinal, offset), found through the ids of the path
    weight = {}
    for r, k in zip(*np.nonzero(batch.mask), strict=True):
        at = batch.pred[r, k]
        line = [j for j in range(at + 1) if batch.end[r, j] > at]
        path = (*batch.tokens[r, line].tolist(), int(batch.target[r, k]))
        target[path] = returns[r, k]
        weight[path] = batch.weight[r, k]

    def twin(critic):
        total = 0.0
        for one in episodes:
            for call in one.calls:
                ids = np.concatenate([call.prompt_ids, call.completion.ids])
                hidden = causal_row(graphdef, critic["trunk"], ids).hidden[0]
                values = hidden @ critic["value"] + critic["bias"]
                for i in range(call.prompt_tok, len(ids)):
                    path = tuple(ids[: i + 1].tolist())
                    total += weight[path] * 0.5 * (values[i - 1] - target[path]) ** 2
        return total

    def on_trees(critic):
        return value_sums(graphdef, config, critic, batch)[0]

    value, grads = jax.value_and_grad(on_trees)(critic)
    expected, wanted = jax.value_and_grad(twin)(critic)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-6)
    assert gradient_error(wanted, grads) < 1e-6
    late = batch.replace(pred=np.where(batch.mask, batch.pred + 1, -1))
    assert abs(float(value_sums(graphdef, config, critic, late)[0]) - float(value)) > 1e-3


def balance_of_paths(graphdef, params, episodes, weight: float) -> jax.Array:
    """The twin: router statistics of every state that scores a token, each call a row."""
    chosen, probabilities = 0.0, 0.0
    total = 0.0
    for one in episodes:
        for call in one.calls:
            ids = np.concatenate([call.prompt_ids, call.completion.ids])
            out = causal_row(graphdef, params, ids, want_routing=True)
            states = slice(call.prompt_tok - 1, len(ids) - 1)
            logits, routing = out.router_logits[:, 0, states], out.routing[:, 0, states]
            chosen += weight * jnp.sum(jax.nn.one_hot(routing, MODEL.num_experts), (1, 2))
            probabilities += weight * jnp.sum(jax.nn.softmax(logits), 1)
            total += weight * call.completion_tok
    f = jax.lax.stop_gradient(chosen / total)
    return jnp.sum(f * probabilities / total) * MODEL.num_experts / MODEL.num_layers


def test_the_load_is_balanced_as_on_separate_paths(model) -> None:
    graphdef, params = model
    batch, episodes = batch_of("token_mean")

    def on_trees(params, balance):
        rows = batch.replace(balance=balance)
        out = forward_rows(graphdef, "dense", params, rows, want_routing=True)
        load = expert_load(out, rows) / balance.sum() ** 2
        return balance_loss(out, rows, load)

    weight = float(batch.weight[batch.mask][0])
    grad = jax.value_and_grad(on_trees)
    value, grads = grad(params, batch.balance)
    expected, wanted = jax.value_and_grad(
        lambda p: balance_of_paths(graphdef, p, episodes, weight)
    )(params)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-6)
    assert gradient_error(wanted, grads) < 1e-6
    real = batch.end > np.arange(1, batch.tokens.shape[1] + 1)  # wrong: every packed token once
    _, unweighted = grad(params, real.astype(np.float64))
    assert gradient_error(wanted, unweighted) > 0.1


def test_any_split_of_the_batch_has_the_same_balance_gradient(model) -> None:
    """f is of the whole batch beforehand, so the loss is a sum over rows."""
    graphdef, params = model
    made = [random_rollout(i, episode=f"e{i}", max_prompt=40) for i in range(6)]
    episodes = [episode(f"e{i}", c, float(i % 2), group=f"g{i // 2}") for i, c in enumerate(made)]
    config = BatchConfig(
        pack=PackConfig(row_tok=64, train_tok=32), filters=KEEP_ALL, weighting="token_mean"
    )
    ((part,),), _ = build_batch(episodes, config)
    batch: TreeBatch = part.arrays
    assert batch.rows > 2
    selected = [select_calls(e.calls, KEEP_ALL) for e in episodes]
    assert sum(len(s.kept) for s in selected) == len(part.rows.calls)
    loss = LossConfig(balance_coef=0.5, attention="dense", logit_chunk=32)
    out = forward_rows(graphdef, "dense", params, batch, want_routing=True)
    load = expert_load(out, batch) / batch.balance.sum(dtype=np.float64) ** 2
    grad = jax.grad(lambda p, rows: loss_sums(graphdef, loss, p, rows, load)[0])
    whole = grad(params, batch)
    pieces = [grad(params, batch.rows_between(r, r + 1)) for r in range(batch.rows)]
    summed = jax.tree.map(lambda *g: sum(g), *pieces)
    assert gradient_error(whole, summed) < 1e-9

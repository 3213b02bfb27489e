"""The programs of both models: compilations, transfers, micro-steps, replayed routes, extremes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.batch.from_episodes import build_batch, build_sft_batch
from clawgym_jax.batch.scored import set_old
from clawgym_jax.batch.tree_batch import Minibatch, TreeBatch
from clawgym_jax.core.types import CallRecord, Episode
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.logprobs import token_logprobs
from clawgym_jax.model.qwen3 import apply, init, make_head
from clawgym_jax.train.critic import CriticConfig, init_critic, trunk_config
from clawgym_jax.train.policy import SFT, LossConfig
from clawgym_jax.train.state import OptimConfig, init_state, make_optimizer
from clawgym_jax.train.step import TrainStep, ValueStep
from clawgym_jax.tree.filters import FilterConfig
from clawgym_jax.tree.pack import PackConfig
from tests.batch.test_from_episodes import episode
from tests.tree.histories import random_rollout

MODEL = Qwen3Config(
    vocab_size=11, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
)  # fmt: skip
KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
PACK = PackConfig(row_tok=128, train_tok=64, shorter=(64,))
CONFIG = BatchConfig(pack=PACK, filters=KEEP_ALL)
LOSS = LossConfig(logit_chunk=32, attention="dense")
OPTIMIZER = make_optimizer(OptimConfig(learning_rate=1e-3))
COMPILED = "/jax/core/compile/backend_compile_duration"


@functools.cache
def policy() -> tuple[Any, Any]:
    graphdef, params = init(MODEL, jax.random.key(0))
    return graphdef, jax.tree.map(lambda x: 4.0 * x if x.ndim > 2 else x, params)


def episodes(seed: int, rollouts: int, max_prompt: int = 60) -> list[Episode]:
    return [
        episode(
            f"s{seed}e{i}",
            random_rollout(1000 * seed + i, episode=f"s{seed}e{i}", max_prompt=max_prompt),
            float(i % 2),
            group=f"g{i // 4}",
        )
        for i in range(rollouts)
    ]


def minibatch(seed: int, rollouts: int = 8, **options: Any) -> Minibatch:
    (batch,), _ = build_batch(episodes(seed, rollouts), CONFIG, **options)
    return batch


def arrays(batch: Minibatch) -> list[TreeBatch]:
    return [part.arrays for part in batch]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Programs that XLA compiles meanwhile, by the event of each."""
    seen: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_twenty_batches_compile_each_program_once_per_row_length() -> None:
    graphdef, params = policy()
    step = TrainStep(graphdef, OPTIMIZER, LOSS, micro_rows=2, row_tok=128)
    trunk, _ = init(trunk_config(MODEL), jax.random.key(0))
    values = ValueStep(trunk, OPTIMIZER, CriticConfig(attention="dense"), 2, row_tok=128)
    state = init_state(params, OPTIMIZER)
    critic = init_state(init_critic(MODEL, params), OPTIMIZER)
    lengths: set[int] = set()
    shapes: set[tuple[int, int]] = set()
    warm = -1  # how many were compiled until both lengths had been there
    with counted() as compiled:
        for seed in range(20):
            batch = minibatch(seed, rollouts=4 * (1 + seed % 5))
            shapes |= {part.arrays.tokens.shape for part in batch}
            old = [step.logprobs(state.params, part) for part in arrays(batch)]
            batch, _ = set_old(batch, old, CONFIG)
            for part in arrays(batch):
                values.values(critic.params, part)
            state, _ = step.update(state, arrays(batch))
            critic, _ = values.update(critic, arrays(batch))
            lengths |= {part.tokens.shape[1] for part in arrays(batch)}
            if warm < 0 and len(lengths) == 2 and seed >= 4:
                warm = len(compiled)
        assert 0 < warm == len(compiled), "from there on nothing is compiled"
    assert lengths == {64, 128} and len(shapes) > 4, "the batches have to differ"
    for program, times in (
        (step._score, 2), (step._accumulate, 2), (step._apply, 1), (step._zeros, 1),
        (values._score, 2), (values._accumulate, 2), (values._apply, 1),
    ):  # fmt: skip
        assert program._cache_size() == times


def test_arrays_move_only_where_it_is_meant() -> None:
    graphdef, params = policy()
    step = TrainStep(graphdef, OPTIMIZER, LOSS)
    (part, *_) = arrays(minibatch(0))
    step.logprobs(params, part)
    with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device"):
        step.logprobs(jax.tree.map(np.asarray, params), part)


@pytest.mark.parametrize("micro_rows", [2, 8])
def test_any_split_into_passes_gives_the_same_update(micro_rows: int) -> None:
    graphdef, params = policy()
    loss = dataclasses.replace(LOSS, entropy_coef=0.01, balance_coef=0.02)
    batch = arrays(minibatch(3, rollouts=16))
    found = []
    for rows in (1, micro_rows):
        step = TrainStep(graphdef, OPTIMIZER, loss, micro_rows=rows)
        grads, losses, _ = step.gradients(params, batch, step.load(params, batch))
        found.append((float(sum(map(float, losses))), grads))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[0][1]), jax.tree.leaves(found[1][1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [60.0, -60.0, np.inf, -np.inf])
def test_far_off_log_probs_leave_loss_and_gradient_finite(kind: str, gap: float) -> None:
    """Known fault A15: on old, reference and rollout log-probs alike."""
    graphdef, params = policy()
    loss = dataclasses.replace(LOSS, kl_coef=0.1, kl_kind=kind)
    step = TrainStep(graphdef, OPTIMIZER, loss)
    batch = minibatch(1)
    scored = [step.logprobs(params, part) for part in arrays(batch)]
    far = [np.where(part.mask, s - gap, 0.0) for s, part in zip(scored, arrays(batch), strict=True)]
    batch, drift = set_old(batch, far, CONFIG)
    assert all(map(np.isfinite, drift.values()))
    parts = [
        part.replace(ref_logprobs=f.astype(np.float32))
        for part, f in zip(arrays(batch), far, strict=True)
    ]
    grads, losses, _ = step.gradients(params, parts)
    assert np.isfinite(float(sum(map(float, losses))))
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def test_supervised_learning_is_the_mean_of_the_sampled_tokens() -> None:
    graphdef, params = policy()
    config = dataclasses.replace(CONFIG, weighting="token_mean")
    batch, _ = build_sft_batch(episodes(2, 4), config)
    step = TrainStep(graphdef, OPTIMIZER, dataclasses.replace(LOSS, kind=SFT))
    logprobs = [step.logprobs(params, part)[part.mask] for part in arrays(batch)]
    _, metrics = step.update(init_state(params, OPTIMIZER), arrays(batch))
    mean = float(np.concatenate(logprobs).mean())
    np.testing.assert_allclose(metrics["loss"], -mean, rtol=1e-5)
    np.testing.assert_allclose(metrics["nll"], -mean, rtol=1e-5)


# ---- replayed routes (R3) ---------------------------------------------------------------------


LENGTH = 64  # of a row that holds one call


@jax.jit
def linear_row(params: Any, tokens: jax.Array, replay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A plain causal row i32[n] -> log-probs f32[n - 1] of tokens[1:], experts i32[L, n, k]."""
    graphdef, _ = policy()

    def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
        return dense_tree_attention(q, k, v, jnp.full((1, LENGTH), LENGTH, jnp.int32)), cache

    rows = tokens[None], jnp.arange(LENGTH)[None]
    out = apply(graphdef, params, *rows, attend, want_routing=True, replay=replay[:, None])
    assert out.routing is not None
    pred = jnp.arange(LENGTH - 1)[None]
    ones = jnp.ones((1, LENGTH - 1))
    scored = token_logprobs(make_head(graphdef, params), out.hidden, pred, tokens[None, 1:], ones)
    return scored.logprobs[0], out.routing[:, 0]


def row_of(params: Any, call: CallRecord, routes: np.ndarray | None = None) -> list[np.ndarray]:
    """`linear_row` of a call; routes i32[n, L, k] that it goes through, None = its own."""
    ids = np.concatenate([call.prompt_ids, call.completion.ids])
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    replay = np.full((MODEL.num_layers, LENGTH, MODEL.num_experts_per_tok), -1, np.int32)
    if routes is not None:
        replay[:, : len(ids)] = routes.swapaxes(0, 1)
    logprobs, experts = linear_row(params, jnp.asarray(tokens), jnp.asarray(replay))
    start = call.prompt_tok - 1
    return [np.asarray(logprobs)[start : len(ids) - 1], np.asarray(experts)[:, : len(ids)]]


def recorded(calls: list[CallRecord], params: Any) -> list[CallRecord]:
    """With the experts that an engine with these weights went through, u8[P + C, L, k]."""
    out = []
    for call in calls:
        routing = row_of(params, call)[1].astype(np.uint8).swapaxes(0, 1)
        done = dataclasses.replace(call.completion, routing=routing)
        out.append(dataclasses.replace(call, completion=done))
    return out


def other_router(params: Any) -> Any:
    """The same model with a router that prefers other experts."""

    def turned(path: Any, leaf: jax.Array) -> jax.Array:
        return jnp.roll(leaf, 1, axis=-1) if "router" in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(turned, params)


def test_with_replay_a_changed_router_follows_the_recorded_experts() -> None:
    graphdef, params = policy()
    changed = other_router(params)
    made = [
        dataclasses.replace(e, calls=tuple(recorded(list(e.calls), params)))
        for e in episodes(5, 4, max_prompt=LENGTH - 16)
    ]
    step = TrainStep(graphdef, OPTIMIZER, LOSS)
    config = dataclasses.replace(CONFIG, replay_routes=True)
    (batch,), report = build_batch(made, config)
    assert report.route_disagreement == 0.0  # one set of weights recorded everything
    (free,), _ = build_batch(made, CONFIG)
    differing = 0.0
    for part, plain in zip(batch, free, strict=True):
        with_replay = step.logprobs(changed, part.arrays)
        without = step.logprobs(changed, plain.arrays)
        for r, k in zip(*np.nonzero(part.rows.mask & (part.rows.offset == 0)), strict=True):
            call = part.rows.calls[part.rows.call[r, k]]
            slots = slice(k, k + call.completion_tok)
            assert call.completion.routing is not None
            forced, _ = row_of(changed, call, call.completion.routing)
            np.testing.assert_allclose(with_replay[r, slots], forced, atol=2e-5)
            differing = max(differing, float(np.abs(without[r, slots] - forced).max()))
    assert differing > 0.01, "the changed router has to matter"


def test_replay_trains_the_gates_and_says_how_far_the_router_strayed() -> None:
    graphdef, params = policy()
    made = [
        dataclasses.replace(e, calls=tuple(recorded(list(e.calls), params)))
        for e in episodes(6, 4, max_prompt=LENGTH - 16)
    ]
    config = dataclasses.replace(CONFIG, replay_routes=True)
    (batch,), _ = build_batch(made, config)
    step = TrainStep(graphdef, OPTIMIZER, LOSS)
    strayed = {}
    for name, weights in (("same", params), ("changed", other_router(params))):
        grads, _, _ = step.gradients(weights, arrays(batch))
        leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
        router = [g for path, g in leaves if "router" in jax.tree_util.keystr(path)]
        assert all(float(jnp.abs(g).max()) > 1e-6 for g in router)
        _, metrics = step.update(init_state(weights, OPTIMIZER), arrays(batch))
        strayed[name] = metrics["strayed_routes"]
    assert strayed["same"] == 0.0
    assert 0.1 < strayed["changed"] <= 1.0

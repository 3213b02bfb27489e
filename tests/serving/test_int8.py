"""Keys and values as 8-bit integers: the quantiser, attention, what moves them, and the engine.

The engine's twin is a plain forward pass whose keys and values are made integers and numbers again.
Both make the same integers but for an entry (of 15,000 for 60 tokens here) within float32 rounding
of the middle between two: that is off by a scale, and what follows by some 1e-5. Hence SAME; int8
itself changes more than 1e-3 somewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.qwen3 import apply, apply_logits, init
from clawgym_jax.serving import attention, pieces, programs
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.serving.quantised import Int8, quantise, read
from tests.serving.test_native_driver import MODEL as MOE
from tests.serving.test_native_driver import go, prompt_of
from tests.serving.test_rooms_and_pool import WITH_ROOMS

SAME = 2e-4  # of log-probs, against the twin or through another program
MODEL = MOE.replace(num_experts=0, num_experts_per_tok=0)
GRAPH, PARAMS = init(MODEL, jax.random.key(0))
PARAMS = jax.tree.map(lambda x: 3.0 * x if x.ndim > 2 else x, PARAMS)
CONFIG = dataclasses.replace(WITH_ROOMS, kv_dtype="int8")
ENGINE = Engine(GRAPH, MODEL, CONFIG)
ROW_WRITER = Engine(GRAPH, MODEL, CONFIG, forms=programs.TPU)
PLAIN = Engine(GRAPH, MODEL, WITH_ROOMS)


def some(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# --- the quantiser -------------------------------------------------------------------------------

VALUES = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20)


@given(st.lists(st.lists(VALUES, min_size=6, max_size=6), min_size=1, max_size=4))
@example([[0.0] * 6])
@example([[-3.0, 0, 0, 0, 0, 1e-20]])
def test_an_entry_is_off_by_half_a_scale(rows: list[list[float]]) -> None:
    x = np.asarray(rows, np.float32)
    kept = quantise(jnp.asarray(x))
    assert kept.ints.dtype == jnp.int8 and kept.ints.shape == x.shape
    largest = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(kept.scale, largest / 127, rtol=1e-6)
    off = np.abs(np.asarray(read(kept)) - x)
    assert np.all(off <= largest[:, None] / 127 * (0.5 + 1e-4))
    again = quantise(read(kept))  # what was kept once is kept as it is
    np.testing.assert_array_equal(again.ints, kept.ints)
    np.testing.assert_allclose(again.scale, kept.scale, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    assert not np.isfinite(read(quantise(jnp.array([1.0, bad, 2.0])))).any()


# --- attention, against the definition over numbers ----------------------------------------------


def head_by_head(q: Any, keys: Any, values: Any) -> Any:
    """f[H, hd] for q f[H, hd], keys and values f[KV, T, hd]: the definition, in float64."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    group = q.shape[0] // keys.shape[0]
    outs = []
    for head in range(q.shape[0]):
        weights = np.exp(keys[head // group] @ q[head] / np.sqrt(q.shape[1]))
        outs.append(weights / weights.sum() @ values[head // group])
    return np.stack(outs)


def in_blocks(q: Any, k: Any, v: Any, past_k: Int8, past_v: Int8, mask: Any) -> jax.Array:
    past = [[x[:, :, :1], x[:, :, 1:20], x[:, :, 20:]] for x in (past_k, past_v)]
    return attention.attend_step_by_block(q, k, v, *past, mask)


@pytest.mark.parametrize("form", [attention.attend_step, in_blocks])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_step_attends_to_what_is_kept(groups: int, form: Callable[..., jax.Array]) -> None:
    q = some(3, 1, 4, 6, seed=0)
    k, v = (quantise(3.0 * some(3, 1, groups, 6, seed=i)) for i in (1, 2))
    past_k, past_v = (quantise(3.0 * some(3, groups, 37, 6, seed=i)) for i in (3, 4))
    lengths = np.array([0, 5, 37])
    got = jax.jit(form)(q, k, v, past_k, past_v, jnp.arange(37)[None, :] < lengths[:, None])
    for slot, length in enumerate(lengths):
        keys, values = (
            np.concatenate([read(past)[slot, :, :length], read(new)[slot].swapaxes(0, 1)], axis=1)
            for past, new in ((past_k, k), (past_v, v))
        )
        np.testing.assert_allclose(got[slot, 0], head_by_head(q[slot, 0], keys, values), atol=5e-6)


def of_parts(q: Any, past_k: Int8, past_v: Int8, position: Any, block: int) -> jax.Array:
    """`attend_chunk_by_block`, the chunk's own keys taken from where they lie."""
    rows = jnp.arange(3)[:, None]
    own = (x[rows, :, position] for x in (past_k, past_v))
    past = [[x[:, :, :7], x[:, :, 7:]] for x in (past_k, past_v)]
    return attention.attend_chunk_by_block(q, *own, *past, position[:, 0], block)


@pytest.mark.parametrize("form", [attention.attend_chunk, of_parts])
@pytest.mark.parametrize("block", [4, 37])
def test_a_chunk_attends_to_what_is_kept(form: Callable[..., jax.Array], block: int) -> None:
    q, position = some(3, 5, 4, 6, seed=0), jnp.array([0, 7, 31])[:, None] + jnp.arange(5)
    past_k, past_v = (quantise(3.0 * some(3, 2, 37, 6, seed=i)) for i in (1, 2))
    got = jax.jit(form, static_argnames="block")(q, past_k, past_v, position, block=block)
    for row in range(3):
        for i, at in enumerate(np.asarray(position)[row]):
            keys, values = (read(x)[row, :, : at + 1] for x in (past_k, past_v))
            expected = head_by_head(q[row, i], keys, values)
            np.testing.assert_allclose(got[row, i], expected, atol=5e-6)


# --- what moves them -----------------------------------------------------------------------------

SHAPE = (3, 5, 2, 24, 4)  # layers, slots and scratch, heads, tokens, width
SLOTS, STARTS = np.array([4, 1]), np.array([3, 20])


def moved(cache: pieces.Cache, new: Callable[..., Any]) -> list[Any]:
    """What every way to read and write it gives."""
    rows, position = np.arange(4), np.array([0, 5, 19, 7])
    token = new(3, 4, 2, 1, 4)
    out = [
        pieces.take(cache, SLOTS, 17),
        pieces.take_one(cache, 2, 17),
        pieces.put_one(cache, new(3, 1, 2, 17, 4), 3),
    ]
    for write in (programs.scatter, programs.write_rows):
        out.append(pieces.put(cache, new(3, 2, 2, 17, 4), SLOTS, write))
        if pieces.is_whole(cache) or write is programs.scatter:
            out.append(pieces.put_token(cache, token, rows, position, 20, write))
    if not pieces.is_whole(cache):
        out.append(pieces.put_chunk(cache, new(3, 2, 6, 2, 4), SLOTS, STARTS, 20))
    return out


@pytest.mark.parametrize("edges", [[], [5, 6, 20, 24]])
def test_integers_and_scales_move_as_an_array_does(edges: list[int]) -> None:
    kept = quantise(some(*SHAPE, seed=0))

    def outcome(part: Callable[[Int8], Any]) -> list[Any]:
        """With a part of everything."""
        empty = pieces.empty(SHAPE, jnp.int8, edges)
        cache = jax.tree.map(part, empty, is_leaf=lambda x: isinstance(x, Int8))
        cache = pieces.put(cache, part(kept), np.arange(5), programs.scatter)
        found = moved(cache, lambda *shape: part(quantise(some(*shape, seed=1))))
        return jax.tree.leaves(found)

    both = outcome(lambda x: x)
    ints = outcome(lambda x: x.ints)
    scales = outcome(lambda x: x.scale[..., None])
    assert len(both) == 2 * len(ints) == 2 * len(scales)
    for got, expected in zip(both[::2], ints, strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(both[1::2], scales, strict=True):
        np.testing.assert_array_equal(got, expected[..., 0])


# --- the engine ----------------------------------------------------------------------------------


@pytest.fixture(params=[ENGINE, ROW_WRITER], ids=["cut", "whole"])
def driver(request: pytest.FixtureRequest) -> Iterator[NativeDriver]:
    with NativeDriver(request.param) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@jax.jit
def forward(tokens: jax.Array) -> jax.Array:
    """f32[2, 64, V]: log-probs of passes over i32[64], with keys and values as int8 and as such."""
    end = jnp.full((1, tokens.size), tokens.size, jnp.int32)

    def run(keep: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, None]:
            return dense_tree_attention(q, keep(k), keep(v), end), None

        positions = jnp.arange(tokens.size)[None]
        hidden = apply(GRAPH, PARAMS, tokens[None], positions, attend).hidden
        return jax.nn.log_softmax(apply_logits(GRAPH, PARAMS, hidden)[0])

    return jnp.stack([run(lambda x: read(quantise(x))), run(lambda x: x)])


def twins(prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """f32[2, C] of `ids`, by the twin and by the model."""
    whole = np.zeros(64, np.int32)  # what follows a token does not matter to it
    end = prompt.size + ids.size
    whole[:end] = [*prompt, *ids]
    rows = np.asarray(forward(jnp.asarray(whole)))[:, prompt.size - 1 : end - 1]
    return rows[:, np.arange(ids.size), ids]


def check(pairs: list[tuple[np.ndarray, Completion]]) -> None:
    for prompt, done in pairs:
        np.testing.assert_allclose(done.raw_logprobs, twins(prompt, done.ids)[0], atol=SAME)


def test_log_probs_are_near_those_of_the_model_and_not_the_same(driver: NativeDriver) -> None:
    """Scored, sampled and greedy ones."""
    prompt, ids = prompt_of(1, 30), prompt_of(2, 30)

    async def play() -> list[tuple[np.ndarray, Completion]]:
        drawn = [(prompt_of(i, 5 + 7 * i), t) for i, t in enumerate((1.0, 0.7, 0.0, 0.0))]
        done = [await go(driver, f"d{i}", p, t=t) for i, (p, t) in enumerate(drawn)]
        pairs = [(p, d) for (p, _), d in zip(drawn, done, strict=True)]
        return [(prompt, await driver.score(prompt, ids)), *pairs]

    pairs = asyncio.run(play())
    check(pairs)
    gaps = [np.abs(done.raw_logprobs - twins(prompt, done.ids)[1]).max() for prompt, done in pairs]
    assert min(gaps) > SAME and 1e-3 < max(gaps) < 0.02, gaps  # greedy tokens hardly change


def test_the_model_type_is_the_default_and_is_the_models(driver: NativeDriver) -> None:
    prompt, ids = prompt_of(1, 30), prompt_of(2, 30)
    with NativeDriver(PLAIN) as plain:
        plain.publish(PARAMS, 1)
        exact = asyncio.run(plain.score(prompt, ids))
    np.testing.assert_allclose(exact.raw_logprobs, twins(prompt, ids)[1], atol=1e-5)
    assert np.abs(exact.raw_logprobs - twins(prompt, ids)[0]).max() > 1e-3


def test_a_cached_continuation_is_that_of_a_cold_engine(driver: NativeDriver) -> None:
    """Two episodes take turns in the only slot that is long enough; a third one copies a prefix."""
    talks = [prompt_of(i, 36) for i in range(2)]
    pairs: list[tuple[np.ndarray, Completion]] = []
    for turn in range(3):
        for i, talk in enumerate(talks):
            done = asyncio.run(go(driver, f"e{i}.{turn}", talk, seed=i, max_tok=4))
            if turn:
                assert done.cached_tok >= talk.size - 5 - 1  # but for what is new
            pairs.append((talk, done))
            talks[i] = np.concatenate([talk, done.ids, prompt_of(9, 2)])
    assert driver.stats.pooled_tok > 0
    short = np.concatenate([talks[0][:20], prompt_of(8, 3)])
    copied = asyncio.run(go(driver, "copy", short, max_tok=4))
    assert copied.cached_tok == 20
    for prompt, done in [*pairs, (short, copied)]:
        with NativeDriver(ENGINE) as cold:
            cold.publish(PARAMS, 1)
            fresh = asyncio.run(cold.score(prompt, done.ids))
        assert fresh.cached_tok == 0
        np.testing.assert_allclose(done.raw_logprobs, fresh.raw_logprobs, atol=SAME)


@given(st.integers(0, 10**6))
@settings(max_examples=2)
def test_any_traffic_gets_the_log_probs_of_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    stems = [prompt_of(rng.randrange(99), rng.randrange(1, 40)) for _ in range(3)]

    async def play(driver: NativeDriver) -> list[tuple[np.ndarray, Completion]]:
        async def one(i: int) -> tuple[np.ndarray, Completion]:
            await asyncio.sleep(rng.random() / 50)
            stem = rng.choice(stems)
            prompt = np.concatenate([stem[: rng.randrange(1, stem.size + 1)], prompt_of(i, 3)])
            if rng.random() < 0.2:
                ids = prompt_of(i + 50, rng.randrange(1, 15))
                return prompt, await driver.score(prompt, ids)
            return prompt, await go(driver, f"x{i}", prompt, seed=i, max_tok=rng.randrange(1, 12))

        return list(await asyncio.gather(*(one(i) for i in range(20))))

    for engine in (ENGINE, ROW_WRITER):
        with NativeDriver(engine) as driver:
            driver.publish(PARAMS, 1)
            check(asyncio.run(play(driver)))


def test_same_seed_same_tokens_whatever_is_beside_it(driver: NativeDriver) -> None:
    """To SAME: a row of a product may be rounded otherwise in a larger batch."""
    prompt = prompt_of(1, 20)

    async def crowd() -> list[Completion]:
        jobs = [go(driver, f"c{i}", prompt_of(i, 3 + 5 * (i % 8)), seed=i) for i in range(9)]
        return await asyncio.gather(go(driver, "x", prompt, seed=7), *jobs)

    alone = asyncio.run(go(driver, "alone", prompt, seed=7))
    together = asyncio.run(crowd())[0]
    assert together.ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=SAME)


# --- size, settings ------------------------------------------------------------------------------


def test_it_takes_half_of_the_memory_of_bfloat16() -> None:
    model = MODEL.replace(dtype=np.dtype(jnp.bfloat16), head_dim=128)
    kept = {}
    for kind in ("model", "int8"):
        config = dataclasses.replace(WITH_ROOMS, kv_dtype=kind)
        engine = Engine(GRAPH, model, config)
        state = jax.eval_shape(engine.init_decode_state)
        leaves = jax.tree.leaves((state.k, state.v, state.pool_k, state.pool_v))
        kept[kind] = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        rooms = sum((room.slots + 1) * room.tokens for room in engine.rooms)
        pool = (config.pages + 1) * config.page_tok
        assert kept[kind] == engine.token_bytes * (rooms + pool)
    assert kept["int8"] / kept["model"] == (128 + 4) / 256  # a float32 scale for each vector


def test_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype: expected one of .*got 'fp8'; set"):
        dataclasses.replace(CONFIG, kv_dtype="fp8")  # type: ignore[arg-type]

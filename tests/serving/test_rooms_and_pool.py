"""Slots of several lengths and the cache pool: the same tokens as without, and less work."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError, EngineRestarted
from clawgym_jax.core.types import Completion
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.qwen3 import apply, apply_logits
from clawgym_jax.serving import programs
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.serving.slots import SlotTable
from clawgym_jax.serving.state import Room
from tests.serving.test_native_driver import GRAPH, MODEL, OTHER, PARAMS, go, oracle, prompt_of

WITH_ROOMS = EngineConfig(
    slots=4,
    window_tok=64,
    prefill_batch=2,
    prefill_chunks=(4, 16),
    kv_buckets=(16, 40),
    room_slots=(3, 1),
    room_tok=(32, 64),
    cache_tok=96,
    page_tok=8,
    prefill_budget_tok=16,
)
ENGINE = Engine(GRAPH, MODEL, WITH_ROOMS)
ROW_WRITER = Engine(GRAPH, MODEL, WITH_ROOMS, forms=programs.TPU)
FEW_ROWS = Engine(GRAPH, MODEL, replace(WITH_ROOMS, decode_rows=(1, 2)))
ONE_ROOM = Engine(GRAPH, MODEL, EngineConfig(slots=4, window_tok=64, prefill_chunks=(4, 16)))


@pytest.fixture(params=[ENGINE, ROW_WRITER, FEW_ROWS], ids=["scatter", "rows", "few"])
def driver(request: pytest.FixtureRequest) -> Iterator[NativeDriver]:
    with NativeDriver(request.param) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@jax.jit
def forward(tokens: jax.Array) -> jax.Array:
    """f32[64, V]: log-probs of a plain forward pass over i32[64]."""
    end = jnp.full((1, tokens.size), tokens.size, jnp.int32)

    def attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, None]:
        return dense_tree_attention(q, k, v, end), None

    positions = jnp.arange(tokens.size)[None]
    hidden = apply(GRAPH, PARAMS, tokens[None], positions, attend).hidden
    return jax.nn.log_softmax(apply_logits(GRAPH, PARAMS, hidden)[0])


def check(prompt: np.ndarray, done: Completion) -> None:
    whole = np.zeros(64, np.int32)  # what follows a token does not matter to it
    end = prompt.size + done.ids.size
    whole[:end] = [*prompt, *done.ids]
    rows = np.asarray(forward(jnp.asarray(whole)))[prompt.size - 1 : end - 1]
    np.testing.assert_allclose(done.logprobs, rows[np.arange(done.ids.size), done.ids], atol=1e-5)


def test_every_length_gets_the_tokens_of_one_room(driver: NativeDriver) -> None:
    async def play(on: NativeDriver) -> list[Completion]:
        jobs = [
            go(on, f"r{i}", prompt_of(i, 3 + 7 * (i % 8)), seed=i, max_tok=4 + i % 6)
            for i in range(11)
        ]
        return await asyncio.gather(*jobs)

    with NativeDriver(ONE_ROOM) as plain:
        plain.publish(PARAMS, 1)
        for one, two in zip(asyncio.run(play(plain)), asyncio.run(play(driver)), strict=True):
            assert one.ids.tolist() == two.ids.tolist()
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


def test_a_prefix_moves_to_a_longer_slot(driver: NativeDriver) -> None:
    prompt = prompt_of(1, 10)
    first = asyncio.run(go(driver, "short", prompt, max_tok=5))
    grown = np.concatenate([prompt, first.ids, prompt_of(2, 20)])
    second = asyncio.run(go(driver, "long", grown, max_tok=9))
    assert second.cached_tok == 14
    check(grown, second)


def test_what_slots_lose_the_pool_keeps(driver: NativeDriver) -> None:
    """Three episodes take turns in the only slot that is long enough."""
    talks = [prompt_of(i, 36) for i in range(2)]
    for turn in range(3):
        for i, talk in enumerate(talks):
            before = driver.stats.prefilled_tok
            done = asyncio.run(go(driver, f"e{i}.{turn}", talk, seed=i, max_tok=4))
            check(talk, done)
            if turn:
                assert done.cached_tok >= talk.size - 5 - 1  # but for what is new
                assert driver.stats.prefilled_tok - before <= 6
            talks[i] = np.concatenate([talk, done.ids, prompt_of(9, 2)])
    assert driver.stats.pooled_tok > 0


def test_a_swap_empties_the_pool(driver: NativeDriver) -> None:
    prompt, other = prompt_of(1, 36), prompt_of(2, 36)
    asyncio.run(go(driver, "a", prompt))
    asyncio.run(go(driver, "b", other))  # the first one is in the pool now
    driver.publish(OTHER, 2)
    done = asyncio.run(go(driver, "c", prompt))
    assert done.cached_tok == 0
    np.testing.assert_allclose(done.logprobs, oracle(OTHER, prompt, done.ids, 1.0), atol=1e-5)


@given(st.integers(0, 10**6))
@settings(max_examples=6)
def test_any_traffic_gets_the_log_probs_of_a_forward_pass(seed: int) -> None:
    rng = random.Random(seed)
    stems = [prompt_of(rng.randrange(99), rng.randrange(1, 40)) for _ in range(3)]

    async def play(driver: NativeDriver) -> None:
        async def one(i: int) -> tuple[np.ndarray, Completion]:
            await asyncio.sleep(rng.random() / 50)
            stem = rng.choice(stems)
            prompt = np.concatenate([stem[: rng.randrange(1, stem.size + 1)], prompt_of(i, 3)])
            if rng.random() < 0.2:
                ids = prompt_of(i + 50, rng.randrange(1, 15))
                return prompt, await driver.score(prompt, ids)
            return prompt, await go(driver, f"x{i}", prompt, seed=i, max_tok=rng.randrange(1, 12))

        for prompt, done in await asyncio.gather(*(one(i) for i in range(20))):
            check(prompt, done)

    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        asyncio.run(play(driver))


def test_a_step_comes_after_the_budget_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps at most the budget of 16 tokens, and what is left of a chunk of 16."""
    prefilled: list[int] = []
    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        step = driver._batcher.step

        def watched() -> object:
            prefilled.append(driver.stats.prefilled_tok)
            return step()

        monkeypatch.setattr(driver._batcher, "step", watched)

        async def play() -> None:
            jobs = [go(driver, f"b{i}", prompt_of(i, 22), seed=i, max_tok=9) for i in range(9)]
            await asyncio.gather(*jobs)

        asyncio.run(play())
    between = [later - earlier for earlier, later in itertools.pairwise(prefilled)]
    assert max(between) <= 16 + 2 * 16 - 1  # the last chunk may have two rows
    assert sum(between) + prefilled[0] == driver.stats.prefilled_tok


@pytest.mark.parametrize("buckets", [(16, 16, 40), (40, 16), (64, 100), (32, 32, 64)])
def test_buckets_may_come_in_any_order_twice_and_too_long(buckets: tuple[int, ...]) -> None:
    with NativeDriver(Engine(GRAPH, MODEL, replace(WITH_ROOMS, kv_buckets=buckets))) as driver:
        driver.publish(PARAMS, 1)
        for i, length in enumerate((15, 16, 17, 31, 32, 41, 63)):
            prompt = prompt_of(i, length)
            done = asyncio.run(go(driver, f"b{i}", prompt, max_tok=8))
            check(prompt, done)
            longer = np.concatenate([prompt, done.ids, [1]])
            if longer.size < 64:
                check(longer, asyncio.run(go(driver, f"c{i}", longer, max_tok=8)))


def test_a_restart_does_not_take_back_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of Prometheus only rises."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        for turn in range(2):
            for i in range(6):
                asyncio.run(go(driver, f"e{turn}.{i}", prompt_of(10 * turn + i, 36), max_tok=4))
            evicted = driver.stats.evicted_pages
            if not turn:
                first = evicted
                with monkeypatch.context() as patch:
                    patch.setattr(ENGINE, "generate", broken)
                    with pytest.raises(EngineRestarted):
                        asyncio.run(go(driver, "unlucky", prompt_of(3, 8)))
        assert evicted == 2 * first > 0


def test_short_requests_leave_long_slots_to_those_who_need_them() -> None:
    table = SlotTable([Room(0, 1, 16), Room(1, 1, 64)])
    assert table.choose([10, 10]) == [0, 1]  # nobody needs the long one
    assert table.choose([10, 10, 40]) == [0, 2]
    assert table.choose([40, 40, 10]) == [0, 2]
    claim = table.claim(prompt_of(1, 10), 10)
    assert claim is not None and claim.slot == 0
    assert table.choose([10, 40]) == [1] and table.choose([10]) == [0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"room_slots": (2, 1), "room_tok": (16, 64)}, "add up to slots=4"),
        ({"room_slots": (2, 2), "room_tok": (64, 16)}, "expected room_tok to rise"),
        ({"room_slots": (2, 2), "room_tok": (16, 32)}, "the last room_tok to be window_tok=64"),
        ({"cache_tok": 64, "page_tok": 24}, "whole pages of 24"),
        ({"cache_tok": 8, "page_tok": 16}, "at least a page of 16"),
        ({"cache_tok": -64}, r"engine.cache_tok: expected an integer >= 0, got -64"),
        ({"prefill_batch": 2.0}, "engine.prefill_batch: expected an integer >= 1, got 2.0"),
        ({"prefill_budget_tok": 0}, "engine.prefill_budget_tok: expected an integer >= 1, got 0"),
        ({"kv_buckets": (16, 0)}, "engine.kv_buckets: expected integers >= 1"),
        ({"kv_buckets": (16.5,)}, "engine.kv_buckets: expected integers >= 1"),
        ({"room_slots": (2, 2), "room_tok": (0, 64)}, "engine.room_tok: expected integers >= 1"),
    ],
)
def test_wrong_shapes_say_what_was_expected(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(slots=4, window_tok=64, prefill_chunks=(4, 16), **fields)  # type: ignore[arg-type]

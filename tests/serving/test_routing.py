"""Routes that come with completions are those of the training model's forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.qwen3 import abstract, apply
from clawgym_jax.serving.engine import UNKNOWN_EXPERT, Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver
from tests.serving.test_native_driver import GRAPH, MODEL, OTHER, PARAMS, go, prompt_of

CONFIG = EngineConfig(
    slots=2,
    window_tok=64,
    prefill_batch=2,
    prefill_chunks=(4, 16),
    cache_tok=128,
    page_tok=8,
    routing=True,
)
ENGINE = Engine(GRAPH, MODEL, CONFIG)


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@jax.jit
def routes(tokens: jax.Array) -> jax.Array:
    """i32[L, 64, K] of a plain forward pass over i32[64]."""
    end = jnp.full((1, tokens.size), tokens.size, jnp.int32)

    def attend(q, k, v, cache):
        return dense_tree_attention(q, k, v, end), None

    positions = jnp.arange(tokens.size)[None]
    out = apply(GRAPH, PARAMS, tokens[None], positions, attend, want_routing=True)
    assert out.routing is not None
    return out.routing[:, 0]


def check(prompt: np.ndarray, done: Completion) -> None:
    """Every token but the last, which was sampled and never fed."""
    assert done.routing is not None
    total = prompt.size + done.ids.size
    assert done.routing.shape == (total, MODEL.num_layers, MODEL.num_experts_per_tok)
    assert done.routing.dtype == np.uint8
    whole = np.zeros(64, np.int32)
    whole[:total] = [*prompt, *done.ids]
    expected = np.moveaxis(np.asarray(routes(jnp.asarray(whole))), 0, 1)
    assert np.array_equal(done.routing[: total - 1], expected[: total - 1])
    assert (done.routing[total - 1] == UNKNOWN_EXPERT).all()


def test_prompt_and_sampled_tokens(driver: NativeDriver) -> None:
    async def play() -> list[tuple[np.ndarray, Completion]]:
        async def one(i: int) -> tuple[np.ndarray, Completion]:
            prompt = prompt_of(i, 3 + 9 * i)
            return prompt, await go(driver, f"r{i}", prompt, seed=i)

        return await asyncio.gather(*(one(i) for i in range(6)))

    for prompt, done in asyncio.run(play()):
        check(prompt, done)


def test_a_cached_prefix_keeps_its_routes(driver: NativeDriver) -> None:
    prompt = prompt_of(1, 30)
    first = asyncio.run(go(driver, "t1", prompt))
    second = np.concatenate([prompt, first.ids, prompt_of(2, 4)])
    done = asyncio.run(go(driver, "t2", second))
    assert done.cached_tok == 38
    check(second, done)
    sibling = np.concatenate([prompt[:21], prompt_of(3, 5)])
    copied = asyncio.run(go(driver, "t3", sibling))
    assert copied.cached_tok == 21
    check(sibling, copied)


def test_the_pool_keeps_routes(driver: NativeDriver) -> None:
    prompt = prompt_of(1, 40)
    asyncio.run(go(driver, "p0", prompt))
    for i in range(2):  # both slots are written over
        asyncio.run(go(driver, f"o{i}", prompt_of(10 + i, 40)))
    done = asyncio.run(go(driver, "p1", prompt))
    assert driver.stats.pooled_tok > 0 and done.cached_tok > 30
    check(prompt, done)


def test_a_route_is_that_of_the_first_computation(driver: NativeDriver) -> None:
    """After a swap nothing cached is used, so routes are the new weights'."""
    prompt = prompt_of(1, 30)
    asyncio.run(go(driver, "old", prompt))
    driver.publish(OTHER, 2)
    done = asyncio.run(go(driver, "new", prompt))
    assert done.cached_tok == 0 and done.routing is not None
    assert (done.routing[:-1] != UNKNOWN_EXPERT).all()


def test_scored_and_cut_requests_have_no_made_up_routes(driver: NativeDriver) -> None:
    prompt, ids = prompt_of(4, 12), prompt_of(5, 9)
    scored = asyncio.run(driver.score(prompt, ids))
    check(prompt, scored)

    async def cut() -> Completion:
        params = SamplingParams(max_tok=50)
        task = asyncio.create_task(driver.sample("cut", prompt_of(6, 8), params, Stop()))
        while driver.stats.sampled_tok == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        driver.cancel("cut")
        return await task

    before = driver.stats.sampled_tok
    done = asyncio.run(cut())
    assert done.finish in (Finish.ABORT, Finish.LENGTH)  # it may have been through by then
    check(prompt_of(6, 8), done)


def test_dense_models_have_no_routes_and_too_many_experts_are_refused() -> None:
    dense = MODEL.replace(num_experts=0, num_experts_per_tok=0)
    graph, _ = abstract(dense)
    assert not Engine(graph, dense, CONFIG).routing
    with pytest.raises(ConfigError, match="at most 255 experts"):
        Engine(GRAPH, MODEL.replace(num_experts=256), CONFIG)

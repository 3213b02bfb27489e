"""A step that starts before the last one's tokens are known: the same tokens, nothing left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from clawgym_jax.core.types import Completion, Finish, Stop
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.native_driver import NativeDriver
from tests.serving.test_native_driver import (
    CONFIG,
    ENGINE,
    GRAPH,
    MODEL,
    OTHER,
    PARAMS,
    go,
    oracle,
    prompt_of,
)


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for every decode step that is started."""
    calls: list[int] = []
    generate = ENGINE.generate

    def counted(*arguments: object) -> object:
        calls.append(1)
        return generate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ENGINE, "generate", counted)
    return calls


def busy_hour(driver: NativeDriver, seed: int) -> list[Completion]:
    """Requests of all lengths, some with tokens that end them early; second turns."""

    async def talk(i: int) -> list[Completion]:
        rng = random.Random(1000 * seed + i)
        await asyncio.sleep(rng.random() / 50)
        stop = Stop(token_ids=tuple(rng.sample(range(61), 6)))
        prompt, turns = prompt_of(i, rng.randrange(1, 20)), []
        for turn in range(3):
            name = f"{seed}.{i}.{turn}"
            turns.append(await go(driver, name, prompt, i, rng.randrange(1, 12), stop=stop))
            prompt = np.concatenate([prompt, turns[-1].ids, prompt_of(turn, 2)])[:60]
        return turns

    async def play() -> list[Completion]:
        talks = await asyncio.gather(*(talk(i) for i in range(11)))
        return [turn for turns in talks for turn in turns]

    return asyncio.run(play())


@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_of_one_step_after_another(driver: NativeDriver, seed: int) -> None:
    ahead = busy_hour(driver, seed)
    with NativeDriver(Engine(GRAPH, MODEL, CONFIG)) as plain:
        plain._batcher._run_ahead = False
        plain.publish(PARAMS, 1)
        one_by_one = busy_hour(plain, seed)
    for one, two in zip(one_by_one, ahead, strict=True):
        assert one.ids.tolist() == two.ids.tolist() and one.finish == two.finish
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    sampled = sum(done.ids.size for done in ahead)
    assert driver.stats.sampled_tok == driver.stats.slot_steps == sampled


def test_an_end_that_is_known_starts_no_step_too_many(
    driver: NativeDriver, launched: list[int]
) -> None:
    asyncio.run(go(driver, "full", prompt_of(1, 8), max_tok=7))
    assert len(launched) == driver.stats.steps == 7
    asyncio.run(go(driver, "window", prompt_of(2, 60), max_tok=30))
    assert len(launched) == driver.stats.steps == 7 + 4


def test_a_stop_token_costs_a_step_that_changes_nothing(
    driver: NativeDriver, launched: list[int]
) -> None:
    prompt = prompt_of(12, 9)
    free = asyncio.run(go(driver, "free", prompt))
    before, steps = len(launched), driver.stats.steps
    stop = Stop(token_ids=(int(free.ids[3]),))
    stopped = asyncio.run(go(driver, "stopped", prompt, stop=stop))
    kept = free.ids.tolist().index(free.ids[3]) + 1
    assert stopped.finish is Finish.STOP and stopped.ids.tolist() == free.ids[:kept].tolist()
    assert driver.stats.steps - steps == kept and len(launched) - before == kept + 1
    longer = np.concatenate([prompt, stopped.ids, prompt_of(3, 5)])
    after = asyncio.run(go(driver, "after", longer))
    assert after.cached_tok >= 9 + kept - 1
    np.testing.assert_allclose(after.logprobs, oracle(PARAMS, longer, after.ids, 1.0), atol=1e-5)


def test_what_was_under_way_for_old_weights_is_not_given_to_new_requests(
    driver: NativeDriver,
) -> None:
    prompt = prompt_of(5, 12)
    free = asyncio.run(go(driver, "free", prompt))
    stop = Stop(token_ids=(int(free.ids[2]),))
    asyncio.run(go(driver, "stopped", prompt, stop=stop))  # its step ahead is left over
    driver.publish(OTHER, 2)
    done = asyncio.run(go(driver, "new", prompt))
    assert set(done.versions.tolist()) == {2}
    np.testing.assert_allclose(done.logprobs, oracle(OTHER, prompt, done.ids, 1.0), atol=1e-5)

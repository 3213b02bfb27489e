"""What becomes of requests in flight when weights are swapped, by policy."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion, Finish
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.native_driver import NativeDriver
from tests.serving.test_native_driver import (
    CONFIG,
    GRAPH,
    MODEL,
    OTHER,
    PARAMS,
    go,
    oracle,
    prompt_of,
)


@pytest.fixture(params=["drain", "continue", "abort"])
def driver(request: pytest.FixtureRequest) -> Iterator[NativeDriver]:
    config = dataclasses.replace(CONFIG, swap_policy=request.param)
    with NativeDriver(Engine(GRAPH, MODEL, config)) as driver:
        driver.publish(PARAMS, 1)
        yield driver


def swapped_under(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch, prompt: np.ndarray
) -> Completion:
    """A request of 40 tokens; the new weights arrive after its fifth step."""
    step, taken = driver._batcher.step, iter(range(10**6))
    reached, published = threading.Event(), threading.Event()

    def held() -> object:
        if next(taken) == 5:
            reached.set()
            assert published.wait(60)
        return step()

    monkeypatch.setattr(driver._batcher, "step", held)

    async def play() -> Completion:
        task = asyncio.create_task(go(driver, "long", prompt, max_tok=40))
        assert await asyncio.to_thread(reached.wait, 60)
        swap = asyncio.create_task(asyncio.to_thread(driver.publish, OTHER, 2))
        while driver._rounds.pending is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        published.set()
        done = await task
        await swap
        return done

    return asyncio.run(play())


def test_policies(driver: NativeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = driver._rounds.policy
    prompt = prompt_of(9, 10)
    done = swapped_under(driver, monkeypatch, prompt)
    versions = done.versions.tolist()
    assert versions == sorted(versions)
    if policy == "drain":
        assert (len(versions), set(versions), done.finish) == (40, {1}, Finish.LENGTH)
    elif policy == "continue":
        assert (len(versions), set(versions), done.finish) == (40, {1, 2}, Finish.LENGTH)
    else:
        assert (len(versions), set(versions), done.finish) == (6, {1}, Finish.ABORT)
    first = versions.count(1)
    expected = oracle(PARAMS, prompt, done.ids[:first], 1.0)
    np.testing.assert_allclose(done.logprobs[:first], expected, atol=1e-5)
    # What spans a swap serves nobody: the next turn computes all of its prompt anew.
    again = np.concatenate([prompt, done.ids, prompt_of(1, 3)])[:60]
    after = asyncio.run(go(driver, "after", again, max_tok=3))
    assert after.cached_tok == 0 and set(after.versions.tolist()) == {2}
    np.testing.assert_allclose(after.logprobs, oracle(OTHER, again, after.ids, 1.0), atol=1e-5)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        Engine(GRAPH, MODEL, dataclasses.replace(CONFIG, swap_policy="now"))  # type: ignore[arg-type]

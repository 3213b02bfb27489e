"""What fails takes nothing along but itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.core.errors import SamplerError
from clawgym_jax.core.types import Completion, Finish, Stop
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.serving.request import Request
from tests.serving.test_native_driver import ENGINE, PARAMS, go, prompt_of


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 1)
        yield driver


def test_what_had_ended_when_the_engine_failed_is_handed_out(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in no slot any more, so nobody ended it."""
    insert = ENGINE.insert

    def broken(state, rows):
        if not rows.active.any():
            raise RuntimeError("out of order")
        return insert(state, rows)

    async def play() -> Completion:
        return await asyncio.wait_for(go(driver, "lucky", prompt_of(3, 8), max_tok=2), 60)

    with monkeypatch.context() as patch:
        patch.setattr(ENGINE, "insert", broken)
        done = asyncio.run(play())
    assert (len(done.ids), done.finish) == (2, Finish.LENGTH)
    assert asyncio.run(play()).ids.tolist() == done.ids.tolist()
    assert driver.stats.restarts == 1


def test_weights_that_are_not_finite_leave_nothing_behind(driver: NativeDriver) -> None:
    """Under a mask, a weight of 0 times NaN is NaN."""

    async def play(name: str) -> list[Completion]:
        jobs = [go(driver, f"{name}{i}", prompt_of(i, 20), seed=i) for i in range(6)]
        return await asyncio.gather(*jobs)

    before = asyncio.run(play("good"))
    driver.publish(jax.tree.map(lambda x: x * jnp.nan, PARAMS), 2)
    assert not np.isfinite(asyncio.run(play("bad"))[0].logprobs).any()
    driver.publish(PARAMS, 3)
    for one, two in zip(before, asyncio.run(play("again")), strict=True):
        assert one.ids.tolist() == two.ids.tolist()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


def test_a_loop_that_closes_meanwhile_hurts_nobody_else(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed after the driver looked: the call to it raises."""
    gone = asyncio.new_event_loop()
    task = gone.create_task(go(driver, "gone", prompt_of(1, 8), max_tok=30))
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    assert not task.done()
    monkeypatch.setattr(gone, "is_closed", lambda: False)
    done = asyncio.run(go(driver, "stays", prompt_of(2, 8), max_tok=40))
    assert len(done.ids) == 40 and driver.stats.restarts == 0


def test_a_long_prompt_that_is_cancelled_is_not_prefilled_to_its_end(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """62 tokens in chunks of 16; cancelled while the second one is computed."""
    fill = driver._batcher._fill

    def cancelling(group: Sequence[Request]) -> None:
        fill(group)
        if driver.stats.prefilled_tok == 32:
            driver.cancel("long")

    monkeypatch.setattr(driver._batcher, "_fill", cancelling)
    done = asyncio.run(go(driver, "long", prompt_of(1, 63), max_tok=1))
    assert (done.finish, len(done.ids)) == (Finish.ABORT, 0)
    assert driver.stats.prefilled_tok == 32
    again = asyncio.run(go(driver, "again", prompt_of(1, 63), max_tok=1))
    assert again.cached_tok == 32  # what was computed serves the next one


def test_a_tokenizer_that_fails_takes_its_own_request_only() -> None:
    def fails(ids: Sequence[int]) -> str:
        raise ValueError("no such id")

    async def play(driver: NativeDriver) -> list[Completion | BaseException]:
        jobs = [
            go(driver, "stopped", prompt_of(0, 8), stop=Stop(strings=("x",))),
            go(driver, "other", prompt_of(1, 8), seed=1),
        ]
        return await asyncio.gather(*jobs, return_exceptions=True)

    with NativeDriver(ENGINE, decode=fails) as driver:
        driver.publish(PARAMS, 1)
        for _ in range(2):  # its slot and its id are free again
            stopped, other = asyncio.run(play(driver))
            assert isinstance(stopped, SamplerError) and "no such id" in str(stopped)
            assert isinstance(other, Completion) and len(other.ids) == 9
        assert driver.stats.restarts == 0

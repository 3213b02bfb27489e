"""What is wrong is refused before an engine sees it, never cut or cast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from clawgym_jax.core.errors import Overlong, SamplerError
from clawgym_jax.core.types import SamplingParams, Stop
from clawgym_jax.serving.native_driver import NativeDriver
from tests.serving.test_native_driver import ENGINE, PARAMS, go, prompt_of


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE, decode=lambda ids: " ".join(map(str, ids))) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@pytest.mark.parametrize(
    "ids", [np.array([1.5, 2.0]), np.array([2**32 + 3]), np.array([[1, 2]]), np.array(4), [], ["a"]]
)
def test_what_is_no_list_of_ids_is_refused_and_never_cast(driver: NativeDriver, ids) -> None:
    with pytest.raises(SamplerError, match="expected prompt token ids"):
        asyncio.run(go(driver, "odd", ids))
    with pytest.raises(SamplerError, match="expected scored token ids"):
        asyncio.run(driver.score(prompt_of(1, 4), ids))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tok": 0},
        {"max_tok": 2.5},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-9},  # its log-probs were infinite
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": 1 << 40},
        {"min_p": 2.0},
        {"seed": 1.5},
    ],
)
def test_sampling_that_cannot_be_is_refused_before_the_engine_sees_it(
    driver: NativeDriver, wrong: dict[str, float]
) -> None:
    params = SamplingParams(**{"max_tok": 2, **wrong})
    with pytest.raises(SamplerError, match="expected a temperature"):
        asyncio.run(driver.sample("odd", prompt_of(1, 4), params, Stop()))
    assert driver.stats.restarts == 0


def test_an_empty_stop_string_is_refused(driver: NativeDriver) -> None:
    with pytest.raises(SamplerError, match="an empty one"):
        asyncio.run(go(driver, "odd", prompt_of(1, 4), stop=Stop(strings=("x", ""))))


def test_ids_to_score_count_for_the_window(driver: NativeDriver) -> None:
    with pytest.raises(Overlong) as refused:
        asyncio.run(driver.score(prompt_of(1, 10), prompt_of(2, 55)))
    assert (refused.value.prompt_tok, refused.value.window_tok) == (64, 64)
    assert len(asyncio.run(driver.score(prompt_of(1, 10), prompt_of(2, 54))).ids) == 54

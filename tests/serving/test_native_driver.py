"""The driver against a plain forward pass: same log-probs, cached or cold, alone or not."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.core.errors import (
    EngineRestarted,
    NoWeights,
    Overlong,
    SamplerError,
)
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import TINY
from clawgym_jax.model.qwen3 import apply, apply_logits, init
from clawgym_jax.serving import programs
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver

MODEL = TINY.replace(vocab_size=61, hidden_size=32, num_layers=2, num_experts=4)
CONFIG = EngineConfig(
    slots=4, window_tok=64, prefill_batch=2, prefill_chunks=(4, 16), kv_buckets=(24, 40)
)
GRAPH, PARAMS = init(MODEL, jax.random.key(0))
PARAMS = jax.tree.map(lambda x: 3.0 * x if x.ndim > 2 else x, PARAMS)  # distributions with shape
OTHER = jax.tree.map(lambda x: 1.1 * x, PARAMS)
ENGINE = Engine(GRAPH, MODEL, CONFIG)


ROW_WRITER = Engine(GRAPH, MODEL, CONFIG, forms=programs.TPU)  # as on a TPU


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE, decode=lambda ids: " ".join(map(str, ids))) as driver:
        driver.publish(PARAMS, 1)
        yield driver


def oracle(params, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """log softmax(logits / T) of `ids` by one dense forward pass. f32[C]"""
    tokens = jnp.asarray(np.concatenate([prompt, ids]))[None]
    n = tokens.shape[1]
    end = jnp.full((1, n), n, jnp.int32)

    def attend(q, k, v, cache):
        return dense_tree_attention(q, k, v, end), None

    hidden = apply(GRAPH, params, tokens, jnp.arange(n)[None], attend).hidden
    logits = apply_logits(GRAPH, params, hidden)[0] / temperature
    logprobs = jax.nn.log_softmax(logits)[len(prompt) - 1 : -1]
    return np.asarray(jnp.take_along_axis(logprobs, jnp.asarray(ids)[:, None], 1)[:, 0])


def prompt_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, n).astype(np.int32)


async def go(driver: NativeDriver, name: str, prompt, seed=0, max_tok=9, t=1.0, stop=None):
    params = SamplingParams(temperature=t, seed=seed, max_tok=max_tok)
    return await driver.sample(name, prompt, params, stop or Stop())


@pytest.mark.parametrize("length", [1, 2, 5, 17, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_forward_pass(
    driver: NativeDriver, length: int, temperature: float
) -> None:
    prompt = prompt_of(length, length)
    done = asyncio.run(go(driver, "a", prompt, t=temperature))
    assert done.finish is Finish.LENGTH
    assert len(done.ids) == 9
    expected = oracle(PARAMS, prompt, done.ids, temperature)
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(done.raw_logprobs, oracle(PARAMS, prompt, done.ids, 1.0), atol=1e-5)
    assert done.versions.tolist() == [1] * 9


def test_same_seed_same_tokens_whatever_is_beside_it(driver: NativeDriver) -> None:
    prompt = prompt_of(1, 20)

    async def crowd() -> list[Completion]:
        jobs = [go(driver, f"c{i}", prompt_of(i, 3 + 5 * (i % 8)), seed=i) for i in range(13)]
        return await asyncio.gather(go(driver, "x", prompt, seed=7), *jobs)

    alone = asyncio.run(go(driver, "alone", prompt, seed=7))
    together = asyncio.run(crowd())
    assert together[0].ids.tolist() == alone.ids.tolist()
    for i, done in enumerate(together[1:]):
        expected = oracle(PARAMS, prompt_of(i, 3 + 5 * (i % 8)), done.ids, 1.0)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)


def test_both_ways_to_write_the_cache_agree(driver: NativeDriver) -> None:
    async def play(on: NativeDriver) -> list[Completion]:
        jobs = [go(on, f"w{i}", prompt_of(i, 3 + 5 * (i % 8)), seed=i) for i in range(9)]
        first = await asyncio.gather(*jobs)
        again = np.concatenate([prompt_of(2, 13), first[2].ids, prompt_of(1, 5)])
        return [*first, await go(on, "again", again)]

    with NativeDriver(ROW_WRITER) as other:
        other.publish(PARAMS, 1)
        pairs = zip(asyncio.run(play(driver)), asyncio.run(play(other)), strict=True)
        for one, two in pairs:
            assert one.ids.tolist() == two.ids.tolist() and one.cached_tok == two.cached_tok
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-6)


def test_the_next_turn_prefills_only_its_new_tokens(driver: NativeDriver) -> None:
    first_prompt = prompt_of(3, 20)
    first = asyncio.run(go(driver, "t1", first_prompt))
    second_prompt = np.concatenate([first_prompt, first.ids, prompt_of(4, 6)])
    before = driver.stats.prefilled_tok
    second = asyncio.run(go(driver, "t2", second_prompt))
    assert second.cached_tok == 20 + 9 - 1
    assert driver.stats.prefilled_tok - before == 6
    np.testing.assert_allclose(
        second.logprobs, oracle(PARAMS, second_prompt, second.ids, 1.0), atol=1e-5
    )


def test_what_a_slot_keeps_survives_the_decoding_of_others(driver: NativeDriver) -> None:
    first_prompt = prompt_of(30, 20)
    first = asyncio.run(go(driver, "k1", first_prompt))
    for i in range(3):
        asyncio.run(go(driver, f"other{i}", prompt_of(31 + i, 10)))
    second_prompt = np.concatenate([first_prompt, first.ids, prompt_of(40, 3)])
    second = asyncio.run(go(driver, "k2", second_prompt))
    assert second.cached_tok == 20 + 9 - 1
    np.testing.assert_allclose(
        second.logprobs, oracle(PARAMS, second_prompt, second.ids, 1.0), atol=1e-5
    )


def test_siblings_copy_a_common_prefix(driver: NativeDriver) -> None:
    prompt = prompt_of(5, 30)
    asyncio.run(go(driver, "s1", prompt))
    sibling = np.concatenate([prompt[:25], prompt_of(6, 8)])
    done = asyncio.run(go(driver, "s2", sibling))
    assert done.cached_tok == 25
    np.testing.assert_allclose(done.logprobs, oracle(PARAMS, sibling, done.ids, 1.0), atol=1e-5)


def test_a_weight_swap_leaves_no_old_keys(driver: NativeDriver) -> None:
    """Known fault A11."""
    prompt = prompt_of(8, 24)
    asyncio.run(go(driver, "old", prompt))
    driver.publish(OTHER, 2)
    done = asyncio.run(go(driver, "new", prompt))
    assert done.cached_tok == 0
    assert set(done.versions.tolist()) == {2}
    np.testing.assert_allclose(done.logprobs, oracle(OTHER, prompt, done.ids, 1.0), atol=1e-5)


def test_a_swap_drains_what_is_in_flight(driver: NativeDriver) -> None:
    async def both() -> Completion:
        task = asyncio.create_task(go(driver, "long", prompt_of(9, 10), max_tok=40))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(driver.publish, OTHER, 2)
        return await task

    done = asyncio.run(both())
    assert len(set(done.versions.tolist())) == 1
    assert len(done.ids) == 40


def test_score_is_the_forward_pass_and_keeps_its_prefix(driver: NativeDriver) -> None:
    prompt, ids = prompt_of(10, 18), prompt_of(11, 21)
    scored = asyncio.run(driver.score(prompt, ids, 0.5))
    np.testing.assert_array_equal(scored.ids, ids)
    np.testing.assert_allclose(scored.logprobs, oracle(PARAMS, prompt, ids, 0.5), atol=1e-5)
    np.testing.assert_allclose(scored.raw_logprobs, oracle(PARAMS, prompt, ids, 1.0), atol=1e-5)
    again = asyncio.run(go(driver, "after", np.concatenate([prompt, ids, [3, 4]])))
    assert again.cached_tok == 18 + 21 - 1


def test_stop_tokens_stop_strings_and_length(driver: NativeDriver) -> None:
    prompt = prompt_of(12, 9)
    free = asyncio.run(go(driver, "free", prompt))
    stop = Stop(token_ids=(int(free.ids[3]),))
    first = free.ids.tolist().index(free.ids[3])
    stopped = asyncio.run(go(driver, "stopped", prompt, stop=stop))
    assert stopped.finish is Finish.STOP
    assert stopped.ids.tolist() == free.ids[: first + 1].tolist()
    word = " ".join(map(str, free.ids[1:3]))
    by_string = asyncio.run(go(driver, "string", prompt, stop=Stop(strings=(word,))))
    assert (by_string.finish, by_string.stop_string) == (Finish.STOP, word)


def test_greedy_ignores_the_seed(driver: NativeDriver) -> None:
    prompt = prompt_of(13, 9)
    a = asyncio.run(go(driver, "g1", prompt, seed=1, t=0.0))
    b = asyncio.run(go(driver, "g2", prompt, seed=2, t=0.0))
    assert a.ids.tolist() == b.ids.tolist()


def test_overlong_is_refused_not_cut(driver: NativeDriver) -> None:
    with pytest.raises(Overlong, match="prompt of 64 tokens"):
        asyncio.run(go(driver, "big", prompt_of(14, 64)))
    last = asyncio.run(go(driver, "fits", prompt_of(14, 63)))
    assert (len(last.ids), last.finish) == (1, Finish.LENGTH)


@pytest.mark.parametrize("wrong", [-1, 61])
def test_ids_of_another_vocabulary_are_refused(driver: NativeDriver, wrong: int) -> None:
    prompt = np.array([3, wrong, 5], np.int32)
    with pytest.raises(SamplerError, match=r"prompt token ids in \[0, 61\)"):
        asyncio.run(go(driver, "other", prompt))
    with pytest.raises(SamplerError, match=r"scored token ids in \[0, 61\)"):
        asyncio.run(driver.score(prompt_of(1, 4), np.array([wrong])))


def test_cancel_returns_what_was_sampled_and_frees_the_slot(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is held after three steps until all four are cancelled: no race with the clock."""
    step, taken = driver._batcher.step, itertools.count(1)
    reached, cancelled, had = threading.Event(), threading.Event(), dict[str, int]()

    def held() -> object:
        running = driver._batcher.running
        if len(running) == 4 and next(taken) == 4:
            had.update({r.request_id: len(r.ids) for r in running.values()})
            reached.set()
            assert cancelled.wait(60)
        return step()

    monkeypatch.setattr(driver._batcher, "step", held)

    async def play() -> list[Completion]:
        tasks = [
            asyncio.create_task(go(driver, f"k{i}", prompt_of(i, 8), max_tok=50)) for i in range(4)
        ]
        waiting = asyncio.create_task(go(driver, "waiting", prompt_of(20, 8), max_tok=3))
        assert await asyncio.to_thread(reached.wait, 60)
        for i in range(4):
            driver.cancel(f"k{i}")
        cancelled.set()
        return [await waiting, *[await t for t in tasks]]

    waited, *others = asyncio.run(play())
    assert (waited.finish, len(waited.ids)) == (Finish.LENGTH, 3)
    for i, done in enumerate(others):  # what it had, and at most the step that was under way
        assert (
            done.finish is Finish.ABORT and 3 <= had[f"k{i}"] <= len(done.ids) <= had[f"k{i}"] + 1
        )


def test_no_weights_no_tokens() -> None:
    with NativeDriver(ENGINE) as driver, pytest.raises(NoWeights):
        asyncio.run(go(driver, "early", prompt_of(1, 4)))


def test_narrowed_sampling_stays_inside_its_set(driver: NativeDriver) -> None:
    prompt = prompt_of(15, 12)

    async def many(params: SamplingParams) -> set[int]:
        jobs = [
            driver.sample(f"n{s}", prompt, SamplingParams(**{**params, "seed": s}), Stop())
            for s in range(24)
        ]
        return {int(done.ids[0]) for done in await asyncio.gather(*jobs)}

    greedy = asyncio.run(go(driver, "g", prompt, t=0.0, max_tok=1)).ids[0]
    base = {"max_tok": 1, "temperature": 5.0}
    assert asyncio.run(many({**base, "top_k": 1})) == {int(greedy)}
    assert asyncio.run(many({**base, "top_p": 1e-6})) == {int(greedy)}
    assert asyncio.run(many({**base, "min_p": 1.0})) == {int(greedy)}
    assert len(asyncio.run(many(base))) > 5


def test_odd_requests_are_refused_and_leave_the_driver_alive(driver: NativeDriver) -> None:
    with pytest.raises(SamplerError, match="token ids"):
        asyncio.run(go(driver, "flat", prompt_of(1, 8).reshape(2, 4)))

    async def twice() -> list[Completion]:
        ids = prompt_of(2, 4)
        return await asyncio.gather(*(driver.score(prompt_of(1, 8), ids) for _ in range(2)))

    first, second = asyncio.run(twice())
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-6)


def test_an_engine_failure_fails_its_request_only(
    driver: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(ENGINE, "generate", broken)
        with pytest.raises(EngineRestarted, match="out of order"):
            asyncio.run(go(driver, "unlucky", prompt_of(3, 8)))
    done = asyncio.run(go(driver, "next", prompt_of(3, 8)))
    assert done.finish is Finish.LENGTH

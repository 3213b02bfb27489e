"""The stock orchestrator, in process and over real gRPC: the native driver's tokens and manners.

The native driver's own conformance tests run on both (CONFORMANCE); what is here besides them is
what can only go wrong with an orchestrator between, or a process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from clawgym_jax.core.errors import ConfigError, EngineRestarted, NoWeights, SamplerError
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model import hf_weights
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.qwen3 import apply, apply_logits
from clawgym_jax.serving import jetstream_shim
from clawgym_jax.serving.jetstream_driver import JetStreamDriver
from clawgym_jax.serving.jetstream_engine import JetStreamEngine
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from clawgym_jax.serving.native_driver import NativeDriver
from tests.conftest import require
from tests.serving import test_native_driver as native
from tests.serving.test_native_driver import (
    CONFIG,
    ENGINE,
    GRAPH,
    MODEL,
    OTHER,
    PARAMS,
    go,
    prompt_of,
)

CONFORMANCE = (
    "test_logprobs_are_those_of_a_forward_pass",
    "test_same_seed_same_tokens_whatever_is_beside_it",
    "test_the_next_turn_prefills_only_its_new_tokens",
    "test_what_a_slot_keeps_survives_the_decoding_of_others",
    "test_siblings_copy_a_common_prefix",
    "test_a_weight_swap_leaves_no_old_keys",
    "test_a_swap_drains_what_is_in_flight",
    "test_score_is_the_forward_pass_and_keeps_its_prefix",
    "test_stop_tokens_stop_strings_and_length",
    "test_greedy_ignores_the_seed",
    "test_overlong_is_refused_not_cut",
    "test_ids_of_another_vocabulary_are_refused",
    "test_narrowed_sampling_stays_inside_its_set",
    "test_odd_requests_are_refused_and_leave_the_driver_alive",
)
globals().update({name: getattr(native, name) for name in CONFORMANCE})


@pytest.fixture(scope="module", autouse=True)
def extra() -> None:
    found = importlib.util.find_spec("jetstream") is not None
    require(found, "google-jetstream is missing: pip install clawgym_jax[jetstream]")


@jax.jit
def forward(params: Any, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    """f32[64, V]: log-probs of a plain forward pass over i32[64]."""
    end = jnp.full((1, tokens.size), tokens.size, jnp.int32)

    def attend(q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, None]:
        return dense_tree_attention(q, k, v, end), None

    hidden = apply(GRAPH, params, tokens[None], jnp.arange(tokens.size)[None], attend).hidden
    return jax.nn.log_softmax(apply_logits(GRAPH, params, hidden)[0] / temperature)


def oracle(params: Any, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    """f32[C]: the native tests' oracle, compiled for one length instead of each."""
    whole = np.zeros(64, np.int32)  # what follows a token does not matter to it
    whole[: prompt.size + ids.size] = [*prompt, *ids]
    rows = np.asarray(forward(params, whole, np.float32(temperature)))[prompt.size - 1 :]
    return rows[np.arange(ids.size), ids]


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "oracle", oracle)


def spaced(ids: Any) -> str:
    return " ".join(map(str, ids))


class Lasting:
    """A driver that many tests share: each finds the weights as version 1, as in a fresh one."""

    def __init__(self, inner: JetStreamProcess) -> None:
        self._inner = inner
        self._base = inner.version
        self.publish(PARAMS, 1)

    async def sample(self, *args: Any) -> Completion:
        return self._rebased(await self._inner.sample(*args))

    async def score(self, *args: Any) -> Completion:
        return self._rebased(await self._inner.score(*args))

    def _rebased(self, done: Completion) -> Completion:
        return dataclasses.replace(done, versions=done.versions - np.uint32(self._base))

    def publish(self, params: Any, version: int) -> None:
        self._inner.publish(params, self._base + version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def model_folder(folder: Path, model: Any, params: Any) -> Path:
    hf_weights.write(folder, model, params)
    words = {str(i): i for i in range(model.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JetStreamProcess]:
    folder = model_folder(tmp_path_factory.mktemp("model") / "m", MODEL, PARAMS)
    with JetStreamProcess(folder, MODEL, CONFIG) as process:
        yield process


@pytest.fixture
def here() -> Iterator[JetStreamDriver]:
    """In process."""
    with JetStreamDriver(ENGINE, spaced) as driver:
        driver.publish(PARAMS, 1)
        yield driver


@pytest.fixture(params=["here", "process"])
def driver(request: pytest.FixtureRequest) -> Any:
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, JetStreamDriver) else Lasting(found)


# --- the same tokens -----------------------------------------------------------------------------


async def crowd(driver: Any) -> list[Completion]:
    """32 at once, of all kinds."""
    jobs = []
    for i in range(32):
        params = SamplingParams(
            temperature=(0.0, 0.2, 0.7, 1.0)[i % 4],
            top_p=0.9 if i % 5 == 0 else 1.0,
            top_k=7 if i % 7 == 0 else 0,
            seed=1000 + i,
            max_tok=3 + i % 20,
        )
        stop = Stop(token_ids=(3, 7, 11, 19), strings=("4 2", "1 3")) if i % 3 else Stop()
        jobs.append(driver.sample(f"c{i}", prompt_of(i, 1 + 5 * (i % 8)), params, stop))
    return await asyncio.gather(*jobs)


def test_the_same_tokens_as_through_the_native_driver(driver: Any) -> None:
    with NativeDriver(ENGINE, spaced) as other:
        other.publish(PARAMS, 1)
        expected = asyncio.run(crowd(other))
    assert {done.finish for done in expected} == {Finish.STOP, Finish.LENGTH}
    for got, want in zip(asyncio.run(crowd(driver)), expected, strict=True):
        assert got.ids.tolist() == want.ids.tolist()
        assert (got.finish, got.stop_string) == (want.finish, want.stop_string)
        assert got.versions.tolist() == want.versions.tolist()
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)
        np.testing.assert_allclose(got.raw_logprobs, want.raw_logprobs, atol=1e-6)


# --- cancelling and swapping ---------------------------------------------------------------------


class Held:
    """Stops the engine before a step until it is let go: no race with the clock."""

    def __init__(self, driver: JetStreamDriver, running: int, steps: int) -> None:
        self.batcher = driver._engine._batcher
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.had: dict[str, int] = {}
        self._step, self._left = self.batcher.step, itertools.count(-steps)
        self._running = running

    def __call__(self) -> Any:
        running = self.batcher.running.values()
        if len(running) == self._running and next(self._left) == 0:
            self.had = {r.request_id: len(r.ids) for r in running}
            self.reached.set()
            assert self.go_on.wait(60)
        return self._step()


def test_cancel_frees_the_slots_within_two_steps(
    here: JetStreamDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(here, running=4, steps=3)
    monkeypatch.setattr(held.batcher, "step", held)

    async def play() -> list[Completion]:
        tasks = [
            asyncio.create_task(go(here, f"k{i}", prompt_of(i, 8), max_tok=50)) for i in range(4)
        ]
        waiting = asyncio.create_task(go(here, "waiting", prompt_of(20, 8), max_tok=3))
        far = [asyncio.create_task(go(here, f"far{i}", prompt_of(i, 8))) for i in range(9)]
        assert await asyncio.to_thread(held.reached.wait, 60)
        for name in [*held.had, *(f"far{i}" for i in range(9))]:
            here.cancel(name)
        held.go_on.set()
        return [await waiting, *[await t for t in [*tasks, *far]]]

    waited, *others = asyncio.run(play())
    assert (waited.finish, len(waited.ids)) == (Finish.LENGTH, 3)
    for i, done in enumerate(others[:4]):  # what it had, and at most the step that was under way
        had = held.had[f"k{i}"]
        assert done.finish is Finish.ABORT and 3 <= had <= len(done.ids) <= had + 1
        np.testing.assert_allclose(
            done.logprobs, oracle(PARAMS, prompt_of(i, 8), done.ids, 1.0), atol=1e-5
        )
    assert {(done.finish, len(done.ids)) for done in others[4:]} == {(Finish.ABORT, 0)}


def test_a_cancel_is_never_too_early(driver: Any) -> None:
    """Not even before the orchestrator has heard of the request: the driver's loop is held."""
    go_on = threading.Event()

    async def play() -> list[Completion]:
        jobs = [go(driver, f"early{i}", prompt_of(i, 8), max_tok=56) for i in range(6)]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0)
        for i in range(6):
            driver.cancel(f"early{i}")
        go_on.set()
        return await asyncio.gather(*tasks)

    driver._loop.call_soon_threadsafe(go_on.wait)

    assert {done.finish for done in asyncio.run(play())} == {Finish.ABORT}


def test_cancelling_the_task_frees_its_slot(here: JetStreamDriver) -> None:
    async def impatient() -> None:
        tasks = [
            asyncio.create_task(go(here, f"x{i}", prompt_of(i, 8), max_tok=50)) for i in range(9)
        ]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await go(here, "next", prompt_of(1, 8))

    asyncio.run(impatient())
    until(lambda: not here._engine._at)
    assert not here._engine._known and not here._engine._batcher.busy


@pytest.mark.parametrize("policy", ["continue", "abort"])
def test_a_swap_under_a_request_says_so(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(9, 10)
    with JetStreamDriver(ENGINE, swap_policy=policy) as driver:
        driver.publish(PARAMS, 1)
        held = Held(driver, running=1, steps=3)
        monkeypatch.setattr(held.batcher, "step", held)

        async def both() -> Completion:
            task = asyncio.create_task(go(driver, "under", prompt, max_tok=12))
            assert await asyncio.to_thread(held.reached.wait, 60)
            swap = asyncio.create_task(asyncio.to_thread(driver.publish, OTHER, 2))
            await asyncio.to_thread(until, lambda: driver._engine._rounds.pending is not None)
            held.go_on.set()
            await swap
            return await task

        done = asyncio.run(both())
        if policy == "continue":
            assert done.versions.tolist() == [1] * 4 + [2] * 8
        else:
            assert done.finish is Finish.ABORT and done.versions.tolist() == [1] * 4
        after = asyncio.run(go(driver, "after", prompt))
        assert after.cached_tok == 0 and set(after.versions.tolist()) == {2}
        np.testing.assert_allclose(after.logprobs, oracle(OTHER, prompt, after.ids, 1.0), atol=1e-5)


def test_no_weights_no_tokens_and_versions_rise() -> None:
    with JetStreamDriver(ENGINE) as driver:
        with pytest.raises(NoWeights):
            asyncio.run(go(driver, "early", prompt_of(1, 4)))
        driver.publish(PARAMS, 3)
        with pytest.raises(ValueError, match="versions rise"):
            driver.publish(PARAMS, 3)
        with pytest.raises(SamplerError, match="stop strings need"):
            asyncio.run(go(driver, "strings", prompt_of(1, 4), stop=Stop(strings=("a",))))


# --- faults --------------------------------------------------------------------------------------


def test_an_engine_failure_fails_its_requests_only(
    here: JetStreamDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = here._engine._batcher
    step, failed = batcher.step, threading.Event()

    def broken() -> Any:
        if len(batcher.running) == 4 and not failed.is_set():
            failed.set()
            raise RuntimeError("out of order")
        return step()

    monkeypatch.setattr(batcher, "step", broken)

    async def play() -> list[Any]:
        jobs = [go(here, f"f{i}", prompt_of(i, 8), max_tok=12) for i in range(9)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    done = asyncio.run(play())
    lost = [d for d in done if isinstance(d, EngineRestarted)]
    assert len(lost) == 4 and "out of order" in str(lost[0])
    assert all(len(d.ids) == 12 for d in done if d not in lost)
    assert here.stats.restarts == 1


def test_a_failing_thread_of_the_orchestrator_restarts_it(
    here: JetStreamDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As released it would kill this process."""
    insert = here._engine.insert

    def broken(prefix: Any, state: Any, slot: int) -> Any:
        if prefix.request.request_id == "unlucky":
            raise RuntimeError("a fault of its own")
        return insert(prefix, state, slot)

    reset, late = here._engine.reset, []

    def with_a_late_comer(error: Exception, closed: bool = False) -> None:
        reset(error, closed)
        if not closed:
            before, job = set(here._host._calls), go(here, "late", prompt_of(2, 8))
            late.append(asyncio.run_coroutine_threadsafe(job, here._loop))
            until(lambda: bool(set(here._host._calls) - before))

    monkeypatch.setattr(here._engine, "insert", broken)
    monkeypatch.setattr(here._engine, "reset", with_a_late_comer)

    async def play() -> list[Any]:
        jobs = [go(here, name, prompt_of(1, 8), max_tok=50) for name in ("beside", "unlucky")]
        return await asyncio.gather(*jobs, return_exceptions=True)

    done = asyncio.run(play())
    assert isinstance(done[1], EngineRestarted) and "a fault of its own" in str(done[1])
    with pytest.raises(EngineRestarted, match="broke off"):
        late[0].result(60)
    until(lambda: here._host._restarting is None)
    assert len(asyncio.run(go(here, "next", prompt_of(1, 8))).ids) == 9


def test_an_idle_generate_thread_goes_on() -> None:
    calls, failures = [], []

    def work() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise AssertionError(
                "At this point we must have some requests inserted into the slots."
            )
        raise AssertionError("anything else")

    thread = jetstream_shim._Thread(failures.append, target=work, name="generate-0")
    thread.start()
    thread.join(10)
    assert len(calls) == 3 and [str(e) for e in failures] == ["anything else"]


def test_closing_leaves_no_thread_and_no_client_waiting() -> None:
    before = set(threading.enumerate())
    driver = JetStreamDriver(ENGINE)
    driver.publish(PARAMS, 1)

    async def caught() -> list[Any]:
        jobs = [go(driver, f"l{i}", prompt_of(i, 8), max_tok=50) for i in range(20)]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(driver.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = asyncio.run(caught())
    assert all(isinstance(e, EngineRestarted | Completion) for e in ended)
    assert any(isinstance(e, EngineRestarted) for e in ended)
    assert set(threading.enumerate()) <= before
    with pytest.raises(EngineRestarted, match="closed"):
        asyncio.run(go(driver, "late", prompt_of(1, 4)))
    with pytest.raises(EngineRestarted, match="closed"):
        driver.publish(PARAMS, 2)


# --- the package ---------------------------------------------------------------------------------


def test_the_whole_engine_interface_is_there() -> None:
    missing = jetstream_shim.load().engine_api.Engine.__abstractmethods__ - set(
        dir(JetStreamEngine)
    )
    assert not missing


def test_the_root_logger_is_left_alone(here: JetStreamDriver) -> None:
    asyncio.run(go(here, "a", prompt_of(1, 4)))
    root = logging.getLogger()
    assert root.level == logging.WARNING
    assert not [h for h in root.handlers if getattr(h, "stream", None) is sys.stdout]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jetstream.core.proto", None)
    with pytest.raises(ConfigError, match=r"pip install clawgym_jax\[jetstream\]"):
        jetstream_shim.wire.__wrapped__()


def until(condition: Callable[[], bool], seconds: int = 10) -> None:
    for _ in range(seconds * 1000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come about")

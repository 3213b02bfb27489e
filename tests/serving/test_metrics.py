"""A real driver's counters, scraped and read by Prometheus's own parser; and those of the log."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, fields, replace

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from clawgym_jax.core.errors import ConfigError, EngineRestarted
from clawgym_jax.core.types import Completion, SamplingParams, Stop
from clawgym_jax.model.config import TINY
from clawgym_jax.model.qwen3 import init
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.metrics import COUNTERS, MetricsEndpoint, UsageMeter, usage
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.serving.request import DriverStats

MODEL = TINY.replace(vocab_size=61, hidden_size=32, num_layers=2, num_experts=4)
SLOTS = 2
CONFIG = EngineConfig(
    slots=SLOTS, window_tok=64, prefill_batch=2, prefill_chunks=(16,), cache_tok=64, page_tok=8
)
GRAPH, PARAMS = init(MODEL, jax.random.key(0))
ENGINE = Engine(GRAPH, MODEL, CONFIG)


@pytest.fixture
def driver() -> Iterator[NativeDriver]:
    with NativeDriver(ENGINE) as driver:
        driver.publish(PARAMS, 3)
        yield driver


def play(driver: NativeDriver, prompts: list[np.ndarray], max_tok: int = 5) -> list[Completion]:
    """All at once."""

    async def all_of_them() -> list[Completion]:
        params = SamplingParams(max_tok=max_tok)
        jobs = [driver.sample(f"r{i}", p, params, Stop()) for i, p in enumerate(prompts)]
        return await asyncio.gather(*jobs)

    return asyncio.run(all_of_them())


def prompt_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, n).astype(np.int32)


def scrape(endpoint: MetricsEndpoint) -> dict[str, float]:
    with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_says_what_the_driver_counted(driver: NativeDriver) -> None:
    with MetricsEndpoint(driver, SLOTS, port=0) as endpoint:
        assert scrape(endpoint)["clawgym_sampled_tokens_total"] == 0
        first, *_ = play(driver, [prompt_of(i, 20) for i in range(3)])  # one has to wait
        for seed in range(3, 8):
            play(driver, [prompt_of(seed, 20)])  # fill the pool and overflow it
        again = np.concatenate([prompt_of(7, 20), prompt_of(8, 4)])
        play(driver, [again])  # the next turn of what is in a slot
        play(driver, [np.concatenate([prompt_of(5, 20), prompt_of(9, 4)])])  # and in the pool
        found = scrape(endpoint)
    stats = driver.stats
    assert len(first.ids) == 5
    assert found["clawgym_sampled_tokens_total"] == stats.sampled_tok == 10 * 5
    assert found["clawgym_queue_seconds_count"] == found["clawgym_first_token_seconds_count"] == 10
    assert found["clawgym_queue_seconds_sum"] == pytest.approx(stats.queue_s)
    assert 0 < stats.queue_s < stats.first_token_s
    assert found["clawgym_first_token_seconds_sum"] == pytest.approx(stats.first_token_s)
    assert found["clawgym_cached_tokens_total"] == stats.cached_tok > stats.pooled_tok
    assert found["clawgym_pooled_tokens_total"] == stats.pooled_tok > 0
    assert found["clawgym_evicted_pages_total"] == stats.evicted_pages > 0
    assert found["clawgym_slots"] == SLOTS and found["clawgym_weight_version"] == 3
    prompts_tok = 8 * 20 + 2 * 24 - 10  # a prompt's last token is fed by the first decode step
    computed_tok = found["clawgym_prefilled_tokens_total"] + found["clawgym_cached_tokens_total"]
    assert computed_tok == prompts_tok
    in_slots = found["clawgym_busy_slot_steps_total"] / found["clawgym_decode_steps_total"]
    assert 1 <= in_slots <= SLOTS


def test_every_counter_of_the_driver_is_told() -> None:
    told = set(COUNTERS) | {"requests", "queue_s", "first_token_s", "first_tokens"}
    assert told == {field.name for field in fields(DriverStats)}


def test_counters_never_fall_while_the_engine_runs(driver: NativeDriver) -> None:
    prompts = [prompt_of(i % 3, 10 + i) for i in range(12)]
    busy = threading.Thread(target=play, args=(driver, prompts, 12))
    with MetricsEndpoint(driver, SLOTS, port=0) as endpoint:
        busy.start()
        seen = [scrape(endpoint)]
        while busy.is_alive():
            seen.append(scrape(endpoint))
        busy.join()
        seen.append(scrape(endpoint))
    for before, after in itertools.pairwise(seen):
        assert all(after[name] >= value for name, value in before.items())
    assert seen[-1]["clawgym_sampled_tokens_total"] == 12 * 12


def test_it_listens_where_it_was_told_and_nowhere_else(driver: NativeDriver) -> None:
    with MetricsEndpoint(driver, SLOTS, port=0) as endpoint:
        elsewhere = endpoint.url.replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(elsewhere, timeout=10)
        with pytest.raises(ConfigError, match="choose another --metrics_port"):
            MetricsEndpoint(driver, SLOTS, endpoint.port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(endpoint)
    with socket.create_server(("127.0.0.1", endpoint.port)):
        pass  # the port is free again


def test_a_restart_is_counted(driver: NativeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of order")

    meter = UsageMeter(driver, SLOTS)
    with MetricsEndpoint(driver, SLOTS, port=0) as endpoint:
        with monkeypatch.context() as patched:
            patched.setattr(ENGINE, "generate", fails)
            with pytest.raises(EngineRestarted):
                play(driver, [prompt_of(0, 5)])
        assert scrape(endpoint)["clawgym_engine_restarts_total"] == 1
    assert meter.since_last()["engine_restarts"] == 1
    assert meter.since_last()["engine_restarts"] == 0


def test_the_log_gets_differences(driver: NativeDriver) -> None:
    meter = UsageMeter(driver, SLOTS)
    (done,) = play(driver, [prompt_of(0, 20)])
    first = meter.since_last()
    assert first["decoded_tok"] == first["decode_steps"] == len(done.ids) == 5
    assert first["slot_use"] == 1 / SLOTS
    assert first["prefix_hit_rate"] == 0
    assert 0 < first["queue_s"] < first["first_token_s"]
    assert first["decoded_tok_per_s"] == pytest.approx(5 / first["serving_busy_s"])
    play(driver, [np.concatenate([prompt_of(0, 20), done.ids, prompt_of(1, 4)])])
    second = meter.since_last()
    assert second["cached_tok"] == 20 + 5 - 1 and second["prefilled_tok"] == 4
    assert second["prefix_hit_rate"] == pytest.approx(24 / 28)
    assert second["pooled_tok"] == 0
    assert set(meter.since_last().values()) == {0.0}  # nothing happened: no division by nothing


def test_means_are_over_what_was_between_the_readings() -> None:
    before = DriverStats(requests=4, queue_s=2.0, steps=10, slot_steps=20, first_tokens=4)
    more = {"requests": 8, "queue_s": 4.0, "steps": 20, "slot_steps": 50}
    found = usage(before, replace(before, **more), slots=4)
    assert (found["queue_s"], found["slot_use"]) == (0.5, 0.75)
    assert found["first_token_s"] == 0.0
    assert asdict(before)["requests"] == 4

"""JetStream's process: real Decode RPCs, cancelled, killed, closed; a prompt it would have cut."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError, EngineRestarted, Overlong
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model.qwen3 import init
from clawgym_jax.serving import jetstream_process
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from clawgym_jax.serving.native_driver import NativeDriver
from tests.serving.test_jetstream import extra as extra
from tests.serving.test_jetstream import model_folder, until
from tests.serving.test_native_driver import MODEL as BASE
from tests.serving.test_native_driver import go, prompt_of

ROOT = Path(__file__).resolve().parents[2]
# One small layer: what a context of 64K tokens costs here is Python, not arithmetic.
MODEL = BASE.replace(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
CONFIG = EngineConfig(
    slots=2, window_tok=65_536, prefill_batch=1, prefill_chunks=(16, 4096), routing=True
)
GRAPH, PARAMS = init(MODEL, jax.random.key(1))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JetStreamProcess]:
    folder = model_folder(tmp_path_factory.mktemp("long") / "m", MODEL, PARAMS)
    with JetStreamProcess(folder, MODEL, CONFIG) as process:
        process.publish(PARAMS, 1)
        yield process


def test_a_prompt_of_40_000_ids_is_not_cut(process: JetStreamProcess) -> None:
    """The stock orchestrator would keep its last 32768, and say nothing."""
    prompt = prompt_of(1, 40_000)

    async def ask(driver: Any) -> Completion:
        params = SamplingParams(seed=5, max_tok=6)
        return await driver.sample("long", prompt, params, Stop())

    with NativeDriver(Engine(GRAPH, MODEL, CONFIG)) as other:
        other.publish(PARAMS, 1)
        want = asyncio.run(ask(other))
    before = process.stats.prefilled_tok
    got = asyncio.run(ask(process))
    assert process.stats.prefilled_tok - before == 40_000 - 1
    assert got.ids.tolist() == want.ids.tolist()
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)
    assert got.routing is not None and got.routing.shape == (40_006, 1, 2)
    np.testing.assert_array_equal(got.routing, want.routing)
    with pytest.raises(Overlong, match="prompt of 65536 tokens"):
        asyncio.run(go(process, "more", prompt_of(1, 65_536)))


async def sampling(driver: JetStreamProcess, name: str) -> asyncio.Task[Completion]:
    """A task whose request is decoding, and will be for long."""
    before = driver.stats.sampled_tok
    task = asyncio.create_task(go(driver, name, prompt_of(1, 8), max_tok=60_000))
    await asyncio.to_thread(until, lambda: driver.stats.sampled_tok >= before + 3)
    return task


def test_cancel_over_grpc(process: JetStreamProcess) -> None:
    async def play() -> list[Any]:
        tasks = [await sampling(process, f"g{i}") for i in range(2)]  # both slots
        waiting = asyncio.create_task(go(process, "waiting", prompt_of(2, 8)))
        process.cancel("g0")
        tasks[1].cancel()
        return await asyncio.gather(*tasks, waiting, return_exceptions=True)

    by_name, by_task, waited = asyncio.run(play())
    assert by_name.finish is Finish.ABORT and 3 <= len(by_name.ids) < 60_000
    assert isinstance(by_task, asyncio.CancelledError)
    assert len(waited.ids) == 9
    steps = process.stats.slot_steps
    asyncio.run(go(process, "alone", prompt_of(3, 8), max_tok=5))
    assert process.stats.slot_steps - steps == 5  # nothing else is decoding any more


def test_a_killed_process_comes_back_with_its_weights(process: JetStreamProcess) -> None:
    before = asyncio.run(go(process, "before", prompt_of(5, 30)))
    restarts, server = process.stats.restarts, process._server
    assert server is not None

    async def play() -> None:
        task = await sampling(process, "unlucky")
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(EngineRestarted, match="went away"):
            await task

    asyncio.run(play())
    after = asyncio.run(go(process, "after", prompt_of(5, 30)))
    assert after.ids.tolist() == before.ids.tolist()
    assert after.versions.tolist() == before.versions.tolist()
    assert after.cached_tok == 0
    assert process.stats.restarts == restarts + 1


def test_closing_leaves_no_process(process: JetStreamProcess) -> None:
    """The last test that uses it."""
    server, folder = process._server, process._folder
    assert server is not None

    async def caught() -> None:
        task = await sampling(process, "caught")
        await asyncio.to_thread(process.close)
        with pytest.raises(EngineRestarted):
            await task

    asyncio.run(caught())
    assert server.process.poll() == 0
    assert not folder.exists()


OWNER = """
import sys, time
from pathlib import Path
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from tests.serving.test_jetstream_process import CONFIG, MODEL
with JetStreamProcess(Path(sys.argv[1]), MODEL, CONFIG) as process:
    print(process._server.process.pid, process._folder, flush=True)
    time.sleep(300)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_owner_leaves_neither_server_nor_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", MODEL, PARAMS)
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as owner:
        assert owner.stdout is not None
        pid, left = owner.stdout.readline().split()
        assert alive(int(pid)) and Path(left).exists()
        owner.kill()
    until(lambda: not alive(int(pid)), seconds=60)
    assert not Path(left).exists()


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_process, "_TRIES", 1)
    with pytest.raises(ConfigError, match=r"does not start(.|\n)*config\.json"):
        JetStreamProcess(tmp_path, MODEL, CONFIG)

"""Our engine under one of its drivers: requests at once, greedy, nothing ends early.

    python ours.py native|jetstream|jetstream_process MODEL_FOLDER WINDOW_TOK KV_BUCKETS

KV_BUCKETS: numbers with commas between. Answers of "sample" carry what the driver counted
meanwhile; "device" times the decode program alone, step after step without looking at what it drew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import numpy as np

from clawgym_jax.core.types import SamplingParams, Stop
from clawgym_jax.model import hf_weights
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.jetstream_driver import JetStreamDriver
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from clawgym_jax.serving.metrics import usage
from clawgym_jax.serving.native_driver import NativeDriver
from experiments.bench.engine import busy_rows
from experiments.bench.serving_parts import lines
from experiments.bench.serving_parts.loads import Turn


def engine_config(window_tok: int, kv_buckets: tuple[int, ...]) -> EngineConfig:
    """As experiments/base.py has it for a CPU, and steps for few requests."""
    return EngineConfig(
        slots=32,
        window_tok=window_tok,
        prefill_batch=1,
        prefill_chunks=(32, 64, 128, 384),
        decode_rows=(2, 8),
        kv_buckets=kv_buckets,
    )


class Ours:
    """A driver and the weights that it serves."""

    def __init__(
        self, kind: str, folder: str, config: EngineConfig, stack: contextlib.ExitStack
    ) -> None:
        self._model, graph, self._params = hf_weights.read(folder)
        self.config = config
        self._engine = Engine(graph, self._model, config)
        self._driver = stack.enter_context(make_driver(kind, folder, self._engine))
        self._driver.publish(self._params, 1)
        self._count = 0

    async def sample(self, rollouts: list[list[Turn]]) -> dict[str, Any]:
        """All rollouts at once, the turns of each one after another."""
        before = replace(self._driver.stats)
        self._count += 1
        start = time.perf_counter()
        done = await asyncio.gather(
            *(self._rollout(f"{self._count}-{r}", turns) for r, turns in enumerate(rollouts))
        )
        seconds = time.perf_counter() - start
        after = replace(self._driver.stats)
        return {
            "seconds": seconds,
            "ids": done,
            "usage": usage(before, after, self.config.slots),
            "device_s": after.device_s - before.device_s,
        }

    async def _rollout(self, name: str, turns: list[Turn]) -> list[list[int]]:
        out = []
        for t, turn in enumerate(turns):
            params = SamplingParams(temperature=0.0, max_tok=turn["new_tok"])
            prompt = np.array(turn["prompt"], np.int32)
            done = await self._driver.sample(f"{name}-{t}", prompt, params, Stop())
            out.append(done.ids.tolist())
        return out

    def device(self, length_tok: int, steps: int) -> dict[str, Any]:
        params = self._engine.load_params(self._params)
        rows = busy_rows(self.config.slots, length_tok)
        state = self._engine.insert(self._engine.init_decode_state(), rows)
        state, _ = self._engine.generate(params, state, length_tok)  # compiled here
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = self._engine.generate(params, state, length_tok)
        jax.block_until_ready(state)
        return {"step_s": (time.perf_counter() - start) / steps}


def make_driver(kind: str, folder: str, engine: Engine) -> Any:
    if kind == "native":
        return NativeDriver(engine)
    if kind == "jetstream":
        return JetStreamDriver(engine)
    return JetStreamProcess(Path(folder), engine.model, engine.config)


async def obey(ours: Ours, send: Callable[[dict[str, Any]], None]) -> None:
    config = ours.config
    send({"jax": jax.__version__, "slots": config.slots, "window_tok": config.window_tok})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command.pop("do") == "sample":
            send(await ours.sample(**command))
        else:
            send(ours.device(**command))


def main(kind: str, folder: str, window_tok: str, kv_buckets: str) -> None:
    send = lines.answers()
    config = engine_config(int(window_tok), tuple(map(int, kv_buckets.split(","))))
    with contextlib.ExitStack() as stack:
        asyncio.run(obey(Ours(kind, folder, config, stack), send))


if __name__ == "__main__":
    main(*sys.argv[1:])

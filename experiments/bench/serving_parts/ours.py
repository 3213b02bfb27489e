"""Our engine under one of its drivers: requests at once, greedy, nothing ends early.

    python ours.py native|jetstream|jetstream_process

Answers of "sample" carry what the driver counted meanwhile; "device" times the decode program
alone, step after step without looking at what it drew.
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

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.core.types import SamplingParams, Stop
from clawgym_jax.model import hf_weights
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.jetstream_driver import JetStreamDriver
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from clawgym_jax.serving.metrics import usage
from clawgym_jax.serving.native_driver import NativeDriver
from experiments.bench.engine import busy_rows
from experiments.bench.serving_parts import lines

CONFIG = EngineConfig(
    slots=32,
    window_tok=768,
    prefill_batch=1,
    prefill_chunks=(32, 128, 384),
    kv_buckets=(256, 384, 512),
)  # as experiments/base.py has it for a CPU


class Ours:
    """A driver and the weights that it serves."""

    def __init__(self, kind: str, stack: contextlib.ExitStack) -> None:
        self._model, graph, self._params = hf_weights.read(model_folder(TINY_BASE))
        self._engine = Engine(graph, self._model, CONFIG)
        self._driver = stack.enter_context(make_driver(kind, self._engine))
        self._driver.publish(self._params, 1)
        self._count = 0

    async def sample(self, prompts: list[list[int]], new_tok: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tok=new_tok)
        before = replace(self._driver.stats)
        arrays = [np.array(prompt, np.int32) for prompt in prompts]
        self._count += 1
        start = time.perf_counter()
        done = await asyncio.gather(
            *(
                self._driver.sample(f"{self._count}-{i}", prompt, params, Stop())
                for i, prompt in enumerate(arrays)
            )
        )
        seconds = time.perf_counter() - start
        after = replace(self._driver.stats)
        return {
            "seconds": seconds,
            "ids": [one.ids.tolist() for one in done],
            "usage": usage(before, after, CONFIG.slots),
            "device_s": after.device_s - before.device_s,
        }

    def device(self, length_tok: int, steps: int) -> dict[str, Any]:
        params = self._engine.load_params(self._params)
        rows = busy_rows(CONFIG.slots, length_tok)
        state = self._engine.insert(self._engine.init_decode_state(), rows)
        state, _ = self._engine.generate(params, state, length_tok)  # compiled here
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = self._engine.generate(params, state, length_tok)
        jax.block_until_ready(state)
        return {"step_s": (time.perf_counter() - start) / steps}


def make_driver(kind: str, engine: Engine) -> Any:
    if kind == "native":
        return NativeDriver(engine)
    if kind == "jetstream":
        return JetStreamDriver(engine)
    return JetStreamProcess(model_folder(TINY_BASE), engine.model, engine.config)


async def obey(ours: Ours, send: Callable[[dict[str, Any]], None]) -> None:
    send({"jax": jax.__version__, "slots": CONFIG.slots, "window_tok": CONFIG.window_tok})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command.pop("do") == "sample":
            send(await ours.sample(**command))
        else:
            send(ours.device(**command))


def main(kind: str) -> None:
    send = lines.answers()
    with contextlib.ExitStack() as stack:
        asyncio.run(obey(Ours(kind, stack), send))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a decode step and a prefill cost on this machine, by slots, length and requests.

    python experiments/bench/engine.py [--quick]

The shipped tiny model, all slots busy at the given length; of 32 slots also few of them, in a
program for so many (`decode_rows`), and at a length that a harness has; prefill of one chunk for
one row and for eight rows in one program. Best and median of the repeats, in one run, so that the
ratios hold on a noisy machine. No goal: figures to choose shapes by. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import numpy as np
from absl import app, flags

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.model import hf_weights
from clawgym_jax.serving.engine import DecodeState, Engine, EngineConfig, Prefill, Rows
from clawgym_jax.serving.sampling import Knobs

QUICK = flags.DEFINE_bool("quick", False, "fewer repeats: within a minute")
WINDOW_TOK = 768
SLOTS = (16, 32, 48)
LENGTHS_TOK = (100, 350, 700)
CHUNKS_TOK = (32, 64, 128, 384)
FEW = (1, 2, 8)  # requests, of 32 slots
LONG_TOK = 1500


def times_ms(once: Callable[[], Any], repeats: int) -> dict[str, float]:
    """The first call, which compiles, is not counted."""
    jax.block_until_ready(once())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(once())
        taken.append(1e3 * (time.perf_counter() - start))
    return {"best_ms": round(min(taken), 2), "median_ms": round(statistics.median(taken), 2)}


def busy_rows(slots: int, length_tok: int, busy: int | None = None) -> Rows:
    """The first `busy` slots decode at `length_tok`; None: all of them."""
    active = np.arange(slots) < (slots if busy is None else busy)
    full, ones = np.full(slots, True), np.ones(slots, np.float32)
    zeros = np.zeros(slots, np.int32)
    knobs = Knobs(ones, ones, zeros, np.zeros(slots, np.float32), zeros.astype(np.uint32), zeros)
    return Rows(full, np.full(slots, length_tok, np.int32), zeros, active, knobs)


def decode_ms(
    engine: Engine, params: Any, length_tok: int, repeats: int, busy: int | None = None
) -> dict[str, float]:
    rows = busy_rows(engine.config.slots, length_tok, busy)
    state = engine.insert(engine.init_decode_state(), rows)
    slots = np.flatnonzero(rows.active).tolist()

    def once() -> Any:
        nonlocal state
        state, drawn = engine.generate(params, state, length_tok + repeats + 1, slots)
        return drawn

    return times_ms(once, repeats)


def prefill_ms(engine: Engine, params: Any, chunk_tok: int, repeats: int) -> dict[str, float]:
    rows = engine.config.prefill_batch
    batch = Prefill(
        tokens=np.full((rows, chunk_tok), 7, np.int32),
        slots=np.arange(rows, dtype=np.int32),
        sources=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        targets=np.zeros((rows, chunk_tok), np.int32),
        temperature=np.ones(rows, np.float32),
    )
    state: DecodeState = engine.init_decode_state()

    def once() -> Any:
        nonlocal state
        state, _ = engine.prefill(params, state, batch)
        return state.length, state.k

    return times_ms(once, repeats)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    rows: list[dict[str, Any]] = []
    for row in measure(10 if QUICK.value else 60):
        rows.append(row)
        print(json.dumps(row), flush=True)
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    print(json.dumps({"bench": "engine", "machine": machine, "rows": rows, "goals": []}))


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    model, graph, params = hf_weights.read(model_folder(TINY_BASE))
    shapes = EngineConfig(
        window_tok=WINDOW_TOK,
        prefill_batch=1,
        prefill_chunks=CHUNKS_TOK,
        kv_buckets=(256, 384, 512),
    )
    for slots in SLOTS:
        engine = Engine(graph, model, replace(shapes, slots=slots))
        for length in LENGTHS_TOK:
            found = decode_ms(engine, params, length, min(repeats, WINDOW_TOK - length - 2))
            yield {"part": "decode", "slots": slots, "length_tok": length, **found}
    longer = replace(shapes, slots=32, window_tok=2048, kv_buckets=(256, 1792), decode_rows=FEW)
    engine = Engine(graph, model, longer)
    for length in (LENGTHS_TOK[0], LONG_TOK):
        for busy in (*FEW, 32):
            found = decode_ms(engine, params, length, min(repeats, 100), busy)
            yield {"part": "decode", "slots": 32, "busy": busy, "length_tok": length, **found}
    for prompts in (1, 8):
        engine = Engine(graph, model, replace(shapes, slots=16, prefill_batch=prompts))
        for chunk in CHUNKS_TOK:
            found = prefill_ms(engine, params, chunk, repeats)
            yield {"part": "prefill", "prompts": prompts, "chunk_tok": chunk, **found}


if __name__ == "__main__":
    app.run(main)

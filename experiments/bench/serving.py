"""Tokens per second of our drivers and of Hugging Face `generate`, on the same tiny weights.

    python experiments/bench/serving.py [--quick] [--torch=PYTHON_OF_AN_ENVIRONMENT_WITH_TORCH]

1, 8 and 32 requests at once, greedy, float32 on the CPU, under three loads (`serving_parts.loads`):
cold prompts, all alike, which suit a static batch; the rollouts of the quickstart; and rollouts
through Claude Code, which suit an engine that knows what it has read. Only tokens that were asked
for count. Every contestant is a process of its own and has the machine to itself while it is its
turn; the turns alternate, and a ratio is the median over the rounds of (its seconds / native's).

- native: our driver. It also gives log-probs, which Hugging Face is not asked for.
- native, nothing shared: the same lengths, but no two prompts begin alike: what is left without the
  prefix cache. The rest of the ratio is the cache's.
- jetstream, jetstream_process: the stock orchestrator of google-jetstream 0.2.2 over the same
  engine, in its client's process and over gRPC. Goal: native >= 1.3 times as fast at 32. Extra
  "jetstream".
- huggingface: a batch a turn, with transformers' own choice of experts implementation and with
  "eager", which is faster here at times. Goal: native >= 5 times as fast at 32 as the faster of the
  two. Installed into .cache/torch where --torch names no environment.
- waiting for Python: 1 - seconds of the decode program alone, dispatched without a look at its
  results / seconds per step of the native driver, for requests that are all decoding.

Also said: the share of completions that are, token for token, those of the native driver. --quick
leaves out "eager" and what is not installed, and plays one round. The last line is a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from absl import app, flags

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.model import hf_weights
from experiments.bench.serving_parts import environments, loads
from experiments.bench.serving_parts.lines import Worker
from experiments.bench.serving_parts.loads import LOADS, Load
from experiments.bench.serving_parts.verdicts import (
    COUNTS,
    HUGGING_FACE,
    JETSTREAM,
    NATIVE,
    PROCESS,
    Row,
    agree,
    goals,
)

QUICK = flags.DEFINE_bool("quick", False, "within a minute; what is not installed is left out")
TORCH = flags.DEFINE_string("torch", None, "python of an environment with torch and transformers")
PARTS = Path(__file__).parent / "serving_parts"
UNSHARED = "native, nothing shared"
DECODED_TOK = 160  # of a request that has nothing to prefill
VOCABULARY = 1024
LONGEST_TOK = 4096
CPU = {"JAX_PLATFORMS": "cpu"}


def contestants(python: Path | None, quick: bool) -> tuple[list[str], list[Row]]:
    """Those that are installed, and rows for the others."""
    no_jetstream = "" if environments.has_jetstream() else "pip install clawgym_jax[jetstream]"
    no_torch = "" if python else "run without --quick, or name an environment by --torch"
    lacks = {NATIVE: "", JETSTREAM: no_jetstream, PROCESS: no_jetstream}
    lacks |= dict.fromkeys(list(HUGGING_FACE)[: 1 if quick else None], no_torch)
    missing: list[Row] = []
    for name, lack in lacks.items():
        if lack:
            missing.append({"part": "left out", "contestant": name, "lacks": lack})
            print(f"{name} is left out: {lack}", file=sys.stderr)
    return [name for name, lack in lacks.items() if not lack], missing


def command(name: str, folder: str, load: Load, python: Path | None) -> list[str]:
    if name in HUGGING_FACE:
        return [str(python), str(PARTS / "huggingface.py"), folder, HUGGING_FACE[name]]
    buckets = ",".join(map(str, load.kv_buckets))
    script = str(PARTS / "ours.py")
    return [sys.executable, script, name, folder, str(load.window_tok), buckets]


def throughput(load: Load, workers: dict[str, Worker], rounds: int) -> Iterator[Row]:
    names = [*workers, *([UNSHARED] if load.groups else [])]
    for count in COUNTS:
        seconds: dict[str, list[float]] = {name: [] for name in names}
        same: dict[str, list[bool]] = {name: [] for name in names}
        for number in range(-2, rounds):  # the first two compile programs and warm caches
            asked = loads.rollouts(load, count, number, VOCABULARY)
            other = loads.nothing_shared(asked, number, VOCABULARY)
            answers = {
                name: workers[NATIVE if name == UNSHARED else name].ask(
                    do="sample", rollouts=other if name == UNSHARED else asked
                )
                for name in names
            }
            for name, answer in answers.items() if number >= 0 else ():
                seconds[name].append(answer["seconds"])
                same[name] += agree(answer["ids"], answers[NATIVE]["ids"])
        for name, taken in seconds.items():
            ratios = [s / native for s, native in zip(taken, seconds[NATIVE], strict=True)]
            yield {
                "part": "throughput",
                "load": load.name,
                "contestant": name,
                "requests": count,
                "turns": sum(map(len, asked)),
                "prompt_tok": loads.prompt_tok(asked),
                "new_tok": loads.new_tok(asked),
                "tok_per_s": round(loads.new_tok(asked) / statistics.median(taken), 1),
                "best_tok_per_s": round(loads.new_tok(asked) / min(taken), 1),
                "native_is_faster": round(statistics.median(ratios), 2),
                "same_as_native": None
                if name == UNSHARED
                else round(statistics.mean(same[name]), 3),
                "rounds": rounds,
            }


def waiting_for_python(native: Worker, rounds: int) -> Iterator[Row]:
    """Prompts of one token: there is nothing but decode steps, all of one program."""
    for count in COUNTS:
        step_s, device_s, share = [], [], []
        for number in range(rounds):
            turns = [{"prompt": [number + r], "new_tok": DECODED_TOK} for r in range(count)]
            answer = native.ask(do="sample", rollouts=[[turn] for turn in turns])
            used = answer["usage"]
            step_s.append(used["serving_busy_s"] / used["decode_steps"])
            device = native.ask(do="device", length_tok=DECODED_TOK // 2, steps=DECODED_TOK)
            device_s.append(device["step_s"])
            share.append(1 - answer["device_s"] / used["serving_busy_s"])
        waiting = [1 - d / s for d, s in zip(device_s, step_s, strict=True)]
        yield {
            "part": "waiting for Python",
            "requests": count,
            "step_ms": round(1e3 * statistics.median(step_s), 3),
            "device_step_ms": round(1e3 * statistics.median(device_s), 3),
            "share": round(max(statistics.median(waiting), 0.0), 3),
            "outside_device_get": round(statistics.median(share), 3),
        }


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    python = environments.torch(TORCH.value, install=not quick)
    names, rows = contestants(python, quick)
    versions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for load in (replace(LOADS[0], new_tok=32),) if quick else LOADS:
            with contextlib.ExitStack() as stack:
                workers = {
                    name: stack.enter_context(Worker(command(name, folder, load, python), CPU))
                    for name in names
                }
                versions |= {name: worker.ready() for name, worker in workers.items()}
                parts = [throughput(load, workers, rounds=1 if quick else 5)]
                if not load.groups:
                    parts.append(waiting_for_python(workers[NATIVE], rounds=1 if quick else 5))
                for part in parts:
                    for row in part:
                        rows.append(row)
                        print(json.dumps(row), flush=True)
    return rows, versions


def write_model(folder: str) -> None:
    """The tiny base, whose weights know 1,024 positions; they are rotary, so any number does."""
    config, _, params = hf_weights.read(model_folder(TINY_BASE))
    hf_weights.write(folder, replace(config, max_position_embeddings=LONGEST_TOK), params)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    rows, versions = measure(QUICK.value)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit,
        "contestants": versions,
    }
    result = {"bench": "serving", "machine": machine, "rows": rows, "goals": list(goals(rows))}
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

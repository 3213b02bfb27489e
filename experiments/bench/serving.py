"""Tokens per second of our drivers and of Hugging Face `generate`, on the same tiny weights.

    python experiments/bench/serving.py [--quick] [--torch=PYTHON_OF_AN_ENVIRONMENT_WITH_TORCH]

1, 8 and 32 requests at once, each a prompt of 128 random tokens that nobody has seen before and a
completion of 96 (32 with --quick), greedy, with nothing that ends it early; float32 on the CPU.
Every contestant is a process of its own and has the machine to itself while it is its turn; the
turns alternate, and a ratio is the median over the rounds of (its seconds / native's seconds).

- native: our driver. It also gives log-probs, which Hugging Face is not asked for.
- jetstream, jetstream_process: the stock orchestrator of google-jetstream 0.2.2 over the same
  engine, in its client's process and over gRPC. Goal: native >= 1.3 times as fast at 32. Extra
  "jetstream".
- huggingface: all prompts as one batch, no padding, with transformers' own choice of experts
  implementation and with "eager", which is faster here at times. Goal: native >= 5 times as fast at
  32 as the faster of the two. Installed into .cache/torch where --torch names no environment.
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
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from absl import app, flags

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from experiments.bench.serving_parts import environments
from experiments.bench.serving_parts.lines import Worker

QUICK = flags.DEFINE_bool("quick", False, "within a minute; what is not installed is left out")
TORCH = flags.DEFINE_string("torch", None, "python of an environment with torch and transformers")
PARTS = Path(__file__).parent / "serving_parts"
NATIVE, JETSTREAM, PROCESS = "native", "jetstream", "jetstream_process"
HUGGING_FACE = {"huggingface": "", "huggingface-eager": "eager"}  # contestant -> experts
COUNTS = (1, 8, 32)
PROMPT_TOK = 128
DECODED_TOK = 160  # of a request that has nothing to prefill
VOCABULARY = 1024
CPU = {"JAX_PLATFORMS": "cpu"}
Row = dict[str, Any]


def contestants(python: Path | None, quick: bool) -> tuple[dict[str, list[str]], list[Row]]:
    """Command lines of those that are installed, and rows for the others."""
    found: dict[str, list[str]] = {}
    missing: list[Row] = []

    def add(name: str, command: list[str], lacks: str) -> None:
        if lacks:
            missing.append({"part": "left out", "contestant": name, "lacks": lacks})
            print(f"{name} is left out: {lacks}", file=sys.stderr)
        else:
            found[name] = command

    no_jetstream = "" if environments.has_jetstream() else "pip install clawgym_jax[jetstream]"
    no_torch = "" if python else "run without --quick, or name an environment by --torch"
    for name in (NATIVE, JETSTREAM, PROCESS):
        command = [sys.executable, str(PARTS / "ours.py"), name]
        add(name, command, "" if name == NATIVE else no_jetstream)
    for name, experts in list(HUGGING_FACE.items())[: 1 if quick else None]:
        script = str(PARTS / "huggingface.py")
        add(name, [str(python), script, str(model_folder(TINY_BASE)), experts], no_torch)
    return found, missing


def prompts_of(seed: int, count: int, length_tok: int) -> list[list[int]]:
    rng = random.Random(f"{seed}/{count}")
    return [[rng.randrange(VOCABULARY) for _ in range(length_tok)] for _ in range(count)]


def throughput(workers: dict[str, Worker], rounds: int, new_tok: int) -> Iterator[Row]:
    for count in COUNTS:
        for worker in workers.values():  # programs are compiled and caches warmed
            worker.ask(do="sample", prompts=prompts_of(-1, count, PROMPT_TOK), new_tok=4)
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        same: dict[str, list[bool]] = {name: [] for name in workers}
        for number in range(rounds):
            prompts = prompts_of(number, count, PROMPT_TOK)
            answers = {
                name: worker.ask(do="sample", prompts=prompts, new_tok=new_tok)
                for name, worker in workers.items()
            }
            for name, answer in answers.items():
                seconds[name].append(answer["seconds"])
                pairs = zip(answer["ids"], answers[NATIVE]["ids"], strict=True)
                same[name] += [ids == native for ids, native in pairs]
        for name, taken in seconds.items():
            ratios = [s / native for s, native in zip(taken, seconds[NATIVE], strict=True)]
            yield {
                "part": "throughput",
                "contestant": name,
                "requests": count,
                "tok_per_s": round(count * new_tok / statistics.median(taken), 1),
                "best_tok_per_s": round(count * new_tok / min(taken), 1),
                "native_is_faster": round(statistics.median(ratios), 2),
                "same_as_native": round(statistics.mean(same[name]), 3),
                "rounds": rounds,
            }


def waiting_for_python(native: Worker, rounds: int) -> Iterator[Row]:
    """Prompts of one token: there is nothing but decode steps, all of one program."""
    for count in COUNTS:
        step_s, device_s, share = [], [], []
        for number in range(rounds):
            prompts = prompts_of(number, count, 1)
            answer = native.ask(do="sample", prompts=prompts, new_tok=DECODED_TOK)
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


def goals(rows: list[Row]) -> Iterator[Row]:
    """native's seconds against theirs, at the most requests."""
    ratio = {
        row["contestant"]: row["native_is_faster"]
        for row in rows
        if row["part"] == "throughput" and row["requests"] == max(COUNTS)
    }
    at = f"at {max(COUNTS)} requests"
    for name in (JETSTREAM, PROCESS):
        if name in ratio:
            yield goal(f"native / {name} {at}", ratio[name], 1.3)
    if theirs := [ratio[name] for name in HUGGING_FACE if name in ratio]:
        yield goal(f"native / Hugging Face {at}", min(theirs), 5.0)


def goal(name: str, value: float, at_least: float) -> Row:
    return {"name": name, "value": value, "goal": f">= {at_least}", "ok": value >= at_least}


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    commands, rows = contestants(environments.torch(TORCH.value, install=not quick), quick)
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(argv, CPU)) for name, argv in commands.items()}
        versions = {name: worker.ready() for name, worker in workers.items()}
        parts = (
            throughput(workers, rounds=1 if quick else 5, new_tok=32 if quick else 96),
            waiting_for_python(workers[NATIVE], rounds=1 if quick else 5),
        )
        for part in parts:
            for row in part:
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows, versions


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

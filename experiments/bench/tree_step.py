"""The training step on a tree, beside the same paths packed whole and padded in Hugging Face torch.

    python experiments/bench/tree_step.py [--quick] [--torch=PYTHON_OF_AN_ENVIRONMENT_WITH_TORCH]

Groups of rollouts, one GRPO loss each, forward + backward, float32 on the CPU:
- forks: synthetic, with tokens of all paths / unique tokens of about 2, 4, 8, 16
- claude_code, openclaw, openclaw_completions: how eight recorded rollouts of ten calls coincide, as
  the real programs made their prompts (tests/data/recorded_trees). Seconds are of every 8th or 16th
  token of each part of the tree, since a CPU is too slow for prompts of 20,000; counts are of all.
through two models (`tree_parts.models`): tiny, mostly attention, and wide, mostly its layers.
Three ways to the same loss and gradients (checked at every point):
- tree: `TrainStep.gradients` on what `build_batch` packs, one row
- packed: every path from the root to a leaf whole, several in a row, the same step and attention
- torch: the paths padded to the longest of a batch, a batch at most as large as the tree's row, in
  transformers' Qwen3 with the same weights; the fastest of 1 or 2 threads and transformers' own
  expert layers or "eager". Installed into .cache/torch where --torch names no environment.
  "torch" is kinder to it than its users are (`padded_torch`); "torch_masked" gets the attention
  mask that they pass.
A sampled token is trained in one path only, in all three. "sharing" = tokens of all paths / unique
tokens, padding not counted. Weights are random. The ways take turns; seconds are the best of some
turns after the first.

Goals: (packed / tree seconds) / sharing >= 0.9 and (torch / tree seconds) / sharing >= 2 at every
point; >= 20 times fewer tokens for Claude Code's group than one row per call; `build_batch` of 256
such rollouts < 5 % of the step's time. That step takes too long here: its seconds are those per
unique token of claude_code's point times the batch's tokens, less than the truth, since attention
grows faster, and old log-probs and the update are not counted.
"expected": (packed / tree) / sharing by operations alone, for the published models at full length.
Memory: arguments and temporaries of our compiled pass; in torch what its resident memory rises by
in the first step, and the weights. Live blocks: of 64 x 64 tokens. "live_over_sharing" = (packed /
tree live blocks) / sharing: what attention alone would make of the first goal. It is below 1, since
the tokens that paths repeat are their first ones, which see little. "blind_seconds": the tree's row
if every token saw itself only, that is the step without attention.

The last line is a JSON object. --quick: tiny and claude_code only, of every 64th token.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import numpy as np
from absl import app, flags

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.batch.from_episodes import build_batch
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.types import Episode
from clawgym_jax.tree.pack import PackConfig
from experiments.bench.serving_parts import environments
from experiments.bench.tree_parts import counts, forms, models, structure, synthetic
from experiments.bench.tree_parts.ours import Ours, difference, embedding
from experiments.bench.tree_parts.torch_side import Torch

QUICK = flags.DEFINE_bool("quick", False, "one small group: within a minute on idle cores")
TORCH = flags.DEFINE_string("torch", None, "python of an environment with torch and transformers")
SHARING = (2, 4, 8, 16)
RECORDED = ("claude_code", "openclaw", "openclaw_completions")
TORCH_WAYS = {"torch": False, "torch_masked": True}
BATCH_GROUPS = 32  # of eight rollouts
LOSS_TOLERANCE = 1e-5  # absolute; the sum of |W A| is about 1
GRADIENT_TOLERANCE = 1e-4  # |a - b| / |b|; one token whose experts are a tie can make 9e-5
Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A point of the table."""

    name: str
    episodes: list[Episode]


def groups(quick: bool, sized: models.Sized) -> Iterator[Group]:
    thin = 64 if quick else sized.thin
    for sharing in () if quick else SHARING:
        calls = synthetic.forks(sized.forks_tok, sharing)
        yield Group(f"forks {sharing}", structure.episodes(calls))
    for name in RECORDED[:1] if quick else RECORDED:
        rollouts = structure.expand(structure.stored(name), thin=thin)
        yield Group(f"{name} / {thin}", structure.episodes(rollouts))


def compare(
    group: Group, name: str, ours: Ours, python: Path | None, model: str, turns: int
) -> Row:
    """One group, all ways. name: of the model. `python` None: torch is left out."""
    tree = forms.tree_form(group.episodes)
    paths = forms.paths_of(forms.selections_of(group.episodes))
    packed = forms.packed_form(tree, paths)
    table = forms.id_table(group.episodes, ours.config.vocab_size)
    batches = {"tree": forms.read_through(table, tree), "packed": forms.read_through(table, packed)}
    path_tok = sum(len(path.tokens) for path in paths)
    row: Row = {
        "part": "step",
        "model": name,
        "group": group.name,
        "sharing": round(path_tok / tree.rows.unique_tok, 3),
        "paths": len(paths),
        "unique_tok": tree.rows.unique_tok,
        "path_tok": path_tok,
        "packed_row_tok": packed.rows.tokens.size,
        "trained_tok": int(tree.rows.mask.sum()),
        "tree_live": tree.live,
        "packed_live": packed.live,
        "live_over_sharing": round(packed.live * tree.rows.unique_tok / tree.live / path_tok, 3),
    }
    loss, gradient = ours.gradients(batches["tree"])
    other, packed_gradient = ours.gradients(batches["packed"])
    row["loss"], row["packed_loss_apart"] = loss, abs(other - loss)
    row["packed_gradient_apart"] = difference(packed_gradient, gradient)
    with contextlib.ExitStack() as stack:
        torch: Torch | None = None
        if python:
            data = forms.flat_paths(tree, paths, table)
            torch = Torch(
                python, model, data, tree.rows.tokens.shape[1], ours.config.num_experts > 0
            )
            stack.enter_context(torch)
            row |= torch.facts(loss, embedding(gradient))
        best = best_seconds(ours, batches | {"blind": blind(batches["tree"])}, torch, turns)
    for name, batch in batches.items():
        row[f"{name}_mib"] = round(ours.mib(batch), 1)
    for name, seconds in best.items():
        row[f"{name}_seconds"] = round(seconds, 4)
    for name in best.keys() - {"tree", "blind"}:
        row[f"{name}_over_tree"] = round(best[name] / best["tree"], 2)
    return row


def blind(batch: TreeBatch) -> TreeBatch:
    """The same row, but every token sees itself only: all of a step but attention."""
    length = batch.tokens.shape[1]
    return batch.replace(end=np.broadcast_to(np.arange(1, length + 1, dtype=np.int32), (1, length)))


def best_seconds(
    ours: Ours, batches: dict[str, TreeBatch], torch: Torch | None, turns: int
) -> dict[str, float]:
    """The ways take turns, so that a busy machine slows all alike."""
    taken: dict[str, list[float]] = {
        name: [] for name in [*batches, *(TORCH_WAYS if torch else [])]
    }
    for _ in range(turns):
        for name, batch in batches.items():
            taken[name].append(ours.seconds(batch))
        if torch:
            for name, masked in TORCH_WAYS.items():
                taken[name].append(torch.step(masked)["seconds"])
    return {name: min(seconds) for name, seconds in taken.items()}


def packing(copies: int, point: Row) -> Row:
    """`build_batch` of many rollouts, beside the step's seconds at a point's speed."""
    recorded = structure.stored("claude_code")
    episodes = [
        episode
        for number in range(copies)
        for episode in structure.episodes(structure.expand(recorded, number), f"g{number}")
    ]
    config = BatchConfig(pack=PackConfig(row_tok=65_536, train_tok=16_384))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        _, report = build_batch(episodes, config)
        taken.append(time.perf_counter() - start)
    row_tok = report.unique_tok + report.repeated_tok
    step_s = point["tree_seconds"] / point["unique_tok"] * row_tok
    return {
        "part": "packing",
        "rollouts": len(episodes),
        "calls": sum(len(episode.calls) for episode in episodes),
        "rows": report.rows,
        "row_tok": row_tok,
        "padding_tok": report.padding_tok,
        "call_tok": report.linear_tok,
        "build_seconds": round(min(taken), 2),
        "step_seconds_at_least": round(step_s, 1),
        "share": round(min(taken) / step_s, 4),
    }


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if row["part"] == "step":
            at, sharing = f"({row['model']}, {row['group']})", row["sharing"]
            over = row["packed_over_tree"] / sharing
            yield goal(f"packed / tree seconds / sharing {at}", over, 0.9)
            if "torch_over_tree" in row:
                over = row["torch_over_tree"] / sharing
                yield goal(f"torch / tree seconds / sharing {at}", over, 2.0)
            yield from same_work(row, at)
        elif row["part"] == "counts" and row["group"] == "claude_code":
            fewer = row["calls_over_unique"]
            yield goal("tokens, one row per call / tree (claude_code)", fewer, 20.0)
        elif row["part"] == "packing":
            yield goal("build_batch / step seconds", row["share"], 0.05, most=True)


def same_work(row: Row, at: str) -> Iterator[Row]:
    for name, value in row.items():
        if name.endswith("_apart"):
            limit = GRADIENT_TOLERANCE if "gradient" in name else LOSS_TOLERANCE
            yield goal(f"{name} {at}", value, limit, most=True)


def goal(name: str, value: float, limit: float, most: bool = False) -> Row:
    ok = value <= limit if most else value >= limit
    said = f"{'<=' if most else '>='} {limit}"
    return {"name": name, "value": float(f"{value:.3g}"), "goal": said, "ok": bool(ok)}


def measure(quick: bool, python: Path | None) -> Iterator[Row]:
    """Rows as they come."""
    for name in RECORDED:
        row = counts.counts(name)
        yield row
        yield from counts.expected(row)
    speed: Row = {}
    for sized in (models.tiny(),) if quick else (models.tiny(), models.wide()):
        ours = Ours(sized.config)
        with tempfile.TemporaryDirectory() as folder:
            ours.save(folder)
            for group in groups(quick, sized):
                row = compare(group, sized.name, ours, python, folder, turns=2 if quick else 3)
                if not speed and group.name.startswith("claude_code"):
                    speed = row
                yield row
    yield packing(2 if quick else BATCH_GROUPS, speed)


def keep_compiled() -> None:
    """A program is compiled once for its seconds and looked at once more for its memory."""
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="tree_step"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    keep_compiled()
    rows = []
    for row in measure(QUICK.value, environments.torch(TORCH.value, install=not QUICK.value)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit,
    }
    result = {"bench": "tree_step", "machine": machine, "rows": rows, "goals": list(goals(rows))}
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

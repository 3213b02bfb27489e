"""Prints the figures of finished runs as the tables of RESULTS.md.

python experiments/figures.py RUN [RUN ...]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clawgym_jax.core.metrics_file import read_metrics

SPLIT = ("rollout_s", "serving_busy_s", "pack_s", "old_logprobs_s", "update_s", "publish_s")


def score(result: dict[str, Any]) -> str:
    return f"{result['mean']:.3f} ({result['low']:.2f}-{result['high']:.2f})"


def passes(runs: list[Path]) -> None:
    """Held-out pass@1 per harness with 95 % Wilson intervals."""
    print("| run | seed | harness | demonstrator | before | after | gain | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        progress = json.loads((run / "progress.json").read_text())
        if "after" not in progress:
            print(f"| {run.name} | not finished |")
            continue
        seed = json.loads((run / "config.json").read_text())["seed"]
        for name, before in progress["before"].items():
            after = progress["after"][name]
            demo = progress.get("demonstrator", {}).get(name)
            print(
                f"| {run.name} | {seed} | {name} | {score(demo) if demo else '-'} "
                f"| {score(before)} | {score(after)} | {after['mean'] - before['mean']:+.3f} "
                f"| {progress['seconds']:.0f} |"
            )


def curves(runs: list[Path]) -> None:
    """Mean reward of a step's rollouts, both harnesses."""
    steps = {run: [m for m in read_metrics(run) if m["stage"] == "train"] for run in runs}
    print("\n| step | " + " | ".join(run.name for run in runs) + " |")
    print("|---|" + "---|" * len(runs))
    for i in range(max((len(s) for s in steps.values()), default=0)):
        cells = [f"{s[i]['reward_mean']:.3f}" if i < len(s) else "" for s in steps.values()]
        print(f"| {i + 1} | " + " | ".join(cells) + " |")


def costs(run: Path) -> None:
    """Median step: where its seconds go, and tokens in the tree against one row per call."""
    steps = [m for m in read_metrics(run) if m["stage"] == "train"][1:]  # the first one compiles
    if not steps:
        return

    def median(name: str) -> float:
        return statistics.median(m[name] for m in steps)

    whole = median("step_s")
    busy = sum(median(n) for n in SPLIT if n != "serving_busy_s")
    print(f"\n{run.name}: median step {whole:.1f} s")
    for name in SPLIT:
        print(f"  {name:<16} {median(name):6.2f} s  {100 * median(name) / whole:5.1f} %")
    waiting = median("rollout_s") - median("serving_busy_s")
    print(f"  harness, sandbox, proxy beyond serving {waiting:6.2f} s")
    print(f"  idle (not in any of these) {whole - busy:6.2f} s")
    tree, linear = median("tree_tok"), median("linear_tok")
    print(f"  tokens: tree {tree:.0f}, one row per call {linear:.0f} ({linear / tree:.1f}x)")
    print(
        f"  sampled {median('sampled_tok'):.0f}, prefilled {median('prefilled_tok'):.0f}, ", end=""
    )
    print(f"from the prefix cache {median('cached_tok'):.0f}")
    print(f"  log-prob gap, worst of the run {max(m['logprob_gap_max'] for m in steps):.1e}")
    peak = json.loads((run / "progress.json").read_text()).get("peak_memory_bytes", 0)
    print(f"  peak resident memory of the trainer process {peak / 2**20:.0f} MiB")


def main() -> None:
    runs = [Path(arg) for arg in sys.argv[1:]]
    if not runs:
        sys.exit(__doc__)
    passes(runs)
    curves(runs)
    for run in runs:
        costs(run)


if __name__ == "__main__":
    main()

"""Trains an experiment: flags -> configuration -> run.

    python launch/train.py --experiment=experiments/quickstart.py --workdir=runs/quickstart \\
        [--override=path.to.field=value ...] [--seed=0] [--from_calls=RUN] [--metrics_port=PORT]

A run that ends leaves report.html. The last line printed is a JSON object with the result. Ctrl-C
keeps everything; the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import app, flags, logging
from rich.table import Table

from clawgym_jax.assemble import Assembly
from clawgym_jax.config import configure, override
from clawgym_jax.core.errors import ClawgymError
from clawgym_jax.model import hf_weights
from clawgym_jax.report.page import write_report
from clawgym_jax.serving.metrics import MetricsEndpoint
from clawgym_jax.train.progress import Display

EXPERIMENT = flags.DEFINE_string("experiment", None, "experiment file with a CONFIG", required=True)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "run folder; an existing one is resumed", required=True
)
OVERRIDE = flags.DEFINE_multi_string("override", [], "path.to.field=value, repeatable")
SEED = flags.DEFINE_integer("seed", None, "the run's seed; default the experiment's")
FROM_CALLS = flags.DEFINE_string("from_calls", None, "run folder to train from, without rollouts")
METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", None, "port of the engine's Prometheus endpoint; 0 = any free one; default none"
)
METRICS_HOST = flags.DEFINE_string("metrics_host", "127.0.0.1", "address it listens on")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    config = configure(Path(EXPERIMENT.value), OVERRIDE.value)
    if SEED.value is not None:
        config = override(config, [f"seed={SEED.value}"])
    from_calls = Path(FROM_CALLS.value) if FROM_CALLS.value else None
    display = Display()
    display.say(f"{config.name}, seed {config.seed}; run folder {WORKDIR.value}")
    with (
        Assembly(config, Path(WORKDIR.value), from_calls, display) as assembly,
        contextlib.ExitStack() as stack,
    ):
        if METRICS_PORT.value is not None:
            where = METRICS_PORT.value, METRICS_HOST.value
            metrics = MetricsEndpoint(assembly.driver, config.engine.slots, *where)
            display.say(f"metrics: {stack.enter_context(metrics).url}")
        progress, state = assembly.loop.execute()
        save_model(assembly, state.policy.params)
    show(display, progress)
    display.say(f"report: {write_report(assembly.folder.path, assembly.model_path)}")
    print(json.dumps(result(progress)), flush=True)
    return 0


def save_model(assembly: Assembly, params: Any) -> None:
    """The final policy as a Hugging Face folder, tokenizer and all."""
    folder = assembly.folder.path / "model"
    hf_weights.write(folder, assembly.model, params, like=assembly.model_path)


def result(progress: dict[str, Any]) -> dict[str, Any]:
    """The last line: held-out pass@1 before and after, seconds, where the run lies."""
    return {
        "before": {name: s["mean"] for name, s in progress.get("before", {}).items()},
        "after": {name: s["mean"] for name, s in progress.get("after", {}).items()},
        "seconds": round(progress["seconds"], 1),
        "workdir": WORKDIR.value,
    }


def show(display: Display, progress: dict[str, Any]) -> None:
    table = Table(title="held-out pass@1 at temperature 1 (95 % interval)")
    for column in ("harness", "before", "after", "instances"):
        table.add_column(column)
    for name, before in progress.get("before", {}).items():
        after = progress["after"][name]
        cells = [f"{s['mean']:.3f} ({s['low']:.2f}-{s['high']:.2f})" for s in (before, after)]
        table.add_row(name, *cells, str(after["graded"]))
    if table.row_count:
        display.console.print(table)


def run() -> None:
    logging.set_verbosity(logging.WARNING)  # orbax tells of every file otherwise
    try:
        app.run(main)
    except (ClawgymError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    run()

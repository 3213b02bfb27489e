"""Writes a run's report, or prints its calls; also while the run is going on.

    python launch/report.py --workdir=runs/quickstart                      # report.html
    python launch/report.py --workdir=runs/quickstart --calls              # every call
    python launch/report.py --workdir=runs/quickstart --calls --episode=ID [--full]

The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import app, flags
from rich.console import Console

from clawgym_jax.core.errors import ClawgymError
from clawgym_jax.report.call_list import print_calls
from clawgym_jax.report.page import write_page
from clawgym_jax.report.run_data import find_codec, load_run, require_folder
from clawgym_jax.report.token_text import load_codec

WORKDIR = flags.DEFINE_string("workdir", None, "run folder", required=True)
CALLS = flags.DEFINE_bool("calls", False, "print the calls instead of writing report.html")
EPISODE = flags.DEFINE_string("episode", None, "with --calls: this episode only, with its texts")
FULL = flags.DEFINE_bool("full", False, "with --calls: all texts, nothing cut")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "tokenizer folder; default: the run's own")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    if not CALLS.value and (EPISODE.value or FULL.value):
        raise app.UsageError("--episode and --full choose what --calls prints; add --calls")
    folder = Path(WORKDIR.value)
    require_folder(folder)
    tokenizer = Path(TOKENIZER.value) if TOKENIZER.value else find_codec(folder)
    result = show_calls(folder, tokenizer) if CALLS.value else write(folder, tokenizer)
    print(json.dumps(result), flush=True)
    return 0


def write(folder: Path, tokenizer: Path | None) -> dict[str, str | int]:
    run = load_run(folder)
    path = write_page(run, folder, tokenizer)
    print(path)
    return {
        "report": str(path),
        "steps": len(run.train),
        "episodes": len(run.episodes),
        "calls": run.calls,
    }


def show_calls(folder: Path, tokenizer: Path | None) -> dict[str, int]:
    console = Console(highlight=False, soft_wrap=True)
    codec, why = load_codec(tokenizer)
    if codec is None and (EPISODE.value or FULL.value):
        console.print(why, markup=False, style="yellow")
    return print_calls(console, folder, codec, EPISODE.value, FULL.value)


def run() -> None:
    try:
        app.run(main)
    except ClawgymError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)


if __name__ == "__main__":
    run()

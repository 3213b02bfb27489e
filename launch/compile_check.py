"""Compiles an experiment's programs for a TPU slice that is not here, and says whether they fit.

    python launch/compile_check.py --experiment=experiments/mix_grpo.py --override=scale=paper \
        --topology=v5p:4x4x4 [--mesh=8,8] [--programs=accumulate,apply,decode,prefill,...]

The real TPU compiler runs on a CPU host (package libtpu); nothing is executed. Printed for each
program: compile time, peak memory of a chip against its limit, the ten largest buffers, FLOPs with
loops counted as often as they run, against the ideal (3 x the forward products of the active
parameters on unique tokens, plus attention over the token pairs that see each other), bytes moved
between chips by kind and to and from a chip's memory (for decode against what must be read), live
attention blocks, and a roofline estimate. FLOPs that depend on data are
those of a made-up load, which is printed. The last line is a JSON object with goals; a missed goal
is `"ok": false`, exit status 0. A program that cannot be compiled or counted is an error, status 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import app, flags, logging
from rich.console import Console

from clawgym_jax import dry_run
from clawgym_jax.compiled.chips import GIB, Chip, chip_of, roofline
from clawgym_jax.compiled.findings import Findings, examine
from clawgym_jax.compiled.hlo import HloError
from clawgym_jax.compiled.topology import devices_of
from clawgym_jax.config import ExperimentConfig, configure
from clawgym_jax.core.errors import ClawgymError

EXPERIMENT = flags.DEFINE_string("experiment", None, "experiment file", required=True)
TOPOLOGY = flags.DEFINE_string("topology", None, "for example v5p:4x4x4", required=True)
MESH = flags.DEFINE_list("mesh", [], "FSDP,X of the training mesh; default the experiment's")
OVERRIDE = flags.DEFINE_multi_string("override", [], "path.to.field=value, repeatable")
PROGRAMS = flags.DEFINE_list("programs", [], "names of programs; default all")
DUMP = flags.DEFINE_string("dump", None, "folder that keeps what the compiler writes")
SHOWN = 10
GOAL_FLOPS, GOAL_GMM, GOAL_DECODE = 1.15, 1.10, 1.25


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    console = Console(highlight=False, soft_wrap=True)
    settings = list(OVERRIDE.value)
    if MESH.value:
        if len(MESH.value) != 2:
            raise app.UsageError(f"--mesh: expected FSDP,X such as 8,8, got {','.join(MESH.value)}")
        settings += [f"mesh.fsdp={MESH.value[0]}", f"mesh.x={MESH.value[1]}"]
    config = configure(Path(EXPERIMENT.value), settings)
    chip, devices = chip_of(TOPOLOGY.value), devices_of(TOPOLOGY.value)
    plan = dry_run.plan(config, devices, devices_of(chip.host))
    console.print(f"{config.name} on {TOPOLOGY.value}: {len(devices)} chips, {plan.describe()}")
    chosen = PROGRAMS.value or list(plan.programs)
    wrong = [name for name in chosen if name not in plan.programs]
    if wrong:
        raise app.UsageError(
            f"--programs: expected some of {', '.join(plan.programs)}, got {wrong}"
        )
    found: dict[str, Findings] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(DUMP.value or temporary)
        for name in chosen:
            console.print(f"compiling {name} ...")
            program = plan.programs[name]
            lowered = program.lower()
            found[name] = examine(
                name, lowered, program.devices, folder / name, plan.shares, program.bounds
            )
            show(console, found[name], chip, plan)
    result = conclude(config, chip, plan, found)
    show_goals(console, result)
    print(json.dumps(result), flush=True)
    return 0


def show(console: Console, found: Findings, chip: Chip, plan: dry_run.Plan) -> None:
    peak = found.peak
    console.print(
        f"{found.name}: compiled in {found.compile_s:.0f} s; peak {peak.peak / GIB:.2f} of "
        f"{chip.hbm_bytes / GIB:.0f} GiB a chip (arguments {peak.arguments / GIB:.2f}, temporaries "
        f"{peak.temporaries / GIB:.2f}, outputs in donated arguments {peak.shared / GIB:.2f})"
    )
    for buffer in found.buffers[:SHOWN]:
        console.print(f"  {buffer.bytes / GIB:8.3f} GiB  {buffer.shape}  {buffer.name}")
    ideal = plan.ideal_flops.get(found.name)
    against = f", {found.flops / ideal:.3f} x ideal ({ideal / 1e12:.2f})" if ideal else ""
    console.print(f"  {found.flops / 1e12:.2f} TFLOP a chip{against}")
    for source, flops in list(found.by_source.items())[:SHOWN]:
        console.print(f"  {flops / 1e12:8.2f} TFLOP  {source[-110:]}")
    console.print(f"  {found.hbm_bytes / 1e9:.2f} GB to and from a chip's memory")
    if found.name == "decode":
        must = plan.decode_bytes
        console.print(
            f"  a step has to read {must / 1e9:.2f} GB (weights, keys and values of full slots), "
            f"at least {1e3 * must / chip.hbm_bytes_per_s:.1f} ms; it moves "
            f"{found.hbm_bytes / must:.2f} times that"
        )
    for kind, size in found.received.items():
        console.print(f"  {size / 1e9:8.2f} GB received by {kind}")
    if ideal:
        times = roofline(chip, found.flops, ideal, sum(found.received.values()))
        low, high = times.step_s
        worst, best = times.mfu
        console.print(
            f"  estimate, not measured: {low:.2f} s (communication hidden) to {high:.2f} s "
            f"(none hidden), MFU {100 * best:.0f} to {100 * worst:.0f} %"
        )


def conclude(
    config: ExperimentConfig, chip: Chip, plan: dry_run.Plan, found: dict[str, Findings]
) -> dict[str, Any]:
    """The last line: each program's numbers, what is resident together, goals."""
    together = {
        "training": plan.training(found),
        "serving": plan.serving(found),
        "serving on chips of its own": plan.serving_alone(found),
    }
    goals = [
        goal(f"{phase}: resident on a chip / its memory", sum(p.values()) / chip.hbm_bytes, 1.0)
        for phase, p in together.items()
        if p
    ]
    for name in ("accumulate", "value_accumulate"):
        if name in found:
            ratio = found[name].flops / plan.ideal_flops[name]
            goals.append(goal(f"{name}: FLOPs / ideal", ratio, GOAL_FLOPS))
    if "decode" in found:
        ratio = found["decode"].hbm_bytes / plan.decode_bytes
        goals.append(goal("decode: bytes moved / bytes that must be read", ratio, GOAL_DECODE))
    if plan.gmm_share is not None:
        goals.append(goal("grouped products: rows computed / rows", plan.gmm_share, GOAL_GMM))
    return {
        "check": "compile",
        "experiment": config.name,
        "topology": TOPOLOGY.value,
        "chips": plan.chips,
        "mesh": plan.mesh,
        "load": plan.load,
        "programs": {
            name: {
                "compile_s": round(f.compile_s, 1),
                "peak_bytes": f.peak.peak,
                "flops": f.flops,
                "hbm_bytes": f.hbm_bytes,
                "ideal_flops": plan.ideal_flops.get(name),
                "received_bytes": f.received,
            }
            for name, f in found.items()
        },
        "resident_bytes": together,
        "hbm_bytes": chip.hbm_bytes,
        "decode_bytes": plan.decode_bytes,
        "goals": goals,
    }


def goal(name: str, value: float, most: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "goal": most, "ok": value <= most}


def show_goals(console: Console, result: dict[str, Any]) -> None:
    for phase, parts in result["resident_bytes"].items():
        for part, size in parts.items():
            console.print(f"resident while {phase}: {size / GIB:8.2f} GiB  {part}")
    for entry in result["goals"]:
        word = "ok" if entry["ok"] else "MISSED"
        console.print(f"goal: {entry['name']} {entry['value']} (at most {entry['goal']}) {word}")


def run() -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(main)
    except (ClawgymError, HloError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    run()

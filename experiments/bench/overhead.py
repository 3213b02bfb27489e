"""What one episode costs beside the harness's and the model's own time.

    python experiments/bench/overhead.py [--quick] [--kinds=process,bubblewrap]

Per episode, one after another: sandbox made and removed, the program's start in it compared with a
bare start (median of `true` in the sandbox minus median of `true` outside), the proxy's own time
per call, settling, and grading in a fresh sandbox. Model time is a scripted player's; its
log-probs are the engine's. The goal (60 ms) is on the median episode of each kind of sandbox.
The last line is a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from absl import app, flags, logging

from clawgym_jax.assemble import make_harness, model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.core.interfaces import SandboxFactory, SandboxSpec
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Outcome, SamplingParams
from clawgym_jax.model import hf_weights
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.rollout.demonstrator import Demonstrator, Mistakes
from clawgym_jax.rollout.episode import Limits, Site
from clawgym_jax.rollout.group import plan_each
from clawgym_jax.rollout.scheduler import RolloutConfig, RolloutHost
from clawgym_jax.rollout.scripted import ScriptedSampler
from clawgym_jax.sandbox.select import make_sandboxes
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.tasks.toy import toy_tasks
from experiments.base import TINY

QUICK = flags.DEFINE_bool("quick", False, "fewer episodes: within a minute")
KINDS = flags.DEFINE_list("kinds", ["process", "bubblewrap"], "kinds of sandbox")
GOAL_MS = 60.0
NO_MISTAKES = Mistakes(0, 0, 0, 0, 0, 0)
WINDOW_TOK = 768


def bare_start_s(repeats: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        subprocess.run(["true"], check=True)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(repeats))


async def sandbox_start_s(factory: SandboxFactory, site: Site, repeats: int) -> float:
    """Median seconds of `true` in a sandbox that exists already."""
    times = []
    for i in range(repeats):
        spec = SandboxSpec(
            run_id="bench",
            episode_id=f"start{i}",
            endpoint_socket=site.socket_dir,
            network_port=site.proxy.port,
        )
        box = await factory.create(spec)
        start = time.perf_counter()
        await box.run(["true"], {"PATH": os.defpath}, timeout_s=10)
        times.append(time.perf_counter() - start)
        await box.close()
    return statistics.median(times)


def measure(kind: str, driver: NativeDriver, codec: ChatCodec, episodes: int) -> dict[str, object]:
    """Median milliseconds per part, over `episodes` episodes of both harnesses."""
    harnesses = [make_harness(name) for name in ("tiny_chat", "tiny_shell")]
    tasks = toy_tasks("train", episodes // 2, seed=0)
    plan = plan_each(tasks, harnesses, split="bench", step=0, seed=0)
    factory = make_sandboxes(kind)
    sampler = ScriptedSampler(Demonstrator(NO_MISTAKES), codec, driver)
    limits = Limits(episode_s=60, window_tok=WINDOW_TOK, max_tok=96)
    with tempfile.TemporaryDirectory() as folder:
        calls, records = (RecordLog(Path(folder) / n) for n in ("calls.log", "episodes.log"))
        config = RolloutConfig(concurrency=1, limits=limits, proxy=TINY.rollout.proxy)
        with (
            calls,
            records,
            RolloutHost("bench", codec, calls, records, factory, config) as host,
        ):
            start_s = asyncio.run(
                sandbox_start_s(make_sandboxes(kind), host.site, max(episodes // 2, 5))
            )
            host.run(plan[:4], sampler, SamplingParams(), on_policy=False)  # warm up
            done = host.run(plan[4:], sampler, SamplingParams(), on_policy=False)
    assert all(e.record.outcome is Outcome.OK and e.reward == 1.0 for e in done)
    parts = {
        name: 1e3 * statistics.median(e.record.timings_s[name] for e in done)
        for name in ("sandbox", "proxy", "settle", "grade")
    }
    parts["start"] = 1e3 * max(start_s - bare_start_s(20), 0.0)
    return {
        "kind": kind,
        "episodes": len(done),
        "calls": statistics.mean(len(e.calls) for e in done),
        **{f"{name}_ms": round(value, 2) for name, value in parts.items()},
        "overhead_ms": round(sum(parts.values()), 2),
        "program_ms": round(
            1e3 * statistics.median(e.record.timings_s["program"] for e in done), 2
        ),
    }


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    folder = model_folder(TINY_BASE)
    model, graphdef, params = hf_weights.read(folder)
    codec = ChatCodec.from_folder(folder)
    engine = Engine(graphdef, model, EngineConfig(slots=4, window_tok=WINDOW_TOK, prefill_batch=2))
    rows = []
    with NativeDriver(engine, codec.decode) as driver:
        driver.publish(params, 1)
        for kind in KINDS.value:
            rows.append(measure(kind, driver, codec, 24 if QUICK.value else 100))
            print(rows[-1], flush=True)
    goals = [
        {
            "name": f"overhead per episode, {row['kind']}, ms",
            "value": row["overhead_ms"],
            "goal": f"<= {GOAL_MS}",
            "ok": bool(row["overhead_ms"] <= GOAL_MS),  # type: ignore[operator]
        }
        for row in rows
    ]
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    print(json.dumps({"bench": "overhead", "machine": machine, "rows": rows, "goals": goals}))


if __name__ == "__main__":
    app.run(main)

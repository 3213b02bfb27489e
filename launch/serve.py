"""Starts engine and proxy for programs that you start yourself, and says how to point them here.

    python launch/serve.py --workdir=runs/serve [--model=FOLDER] [--experiment=FILE]
        [--override=path.to.field=value ...] [--host=127.0.0.1] [--port=8321] [--key=KEY]
        [--harness=generic] [--metrics_port=PORT]

Every call is in WORKDIR/calls.log; `python launch/report.py --workdir=WORKDIR --calls` prints them,
also while this runs. Ctrl-C (or SIGTERM) ends it; the last line printed is a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import app, flags, logging

from clawgym_jax.assemble import HARNESSES, Served, make_harness, open_engine
from clawgym_jax.config import ExperimentConfig, configure, override, to_dict
from clawgym_jax.core.errors import ClawgymError
from clawgym_jax.core.interfaces import Endpoint
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import EpisodeRecord, Grade, Outcome, SamplingParams
from clawgym_jax.proxy import EpisodeSpec, EpisodeTrace, ProxyServer
from clawgym_jax.rollout.store import CALLS, EPISODES
from clawgym_jax.serving.metrics import MetricsEndpoint

DEFAULT = Path(__file__).resolve().parent.parent / "experiments" / "serve_tiny.py"
EXPERIMENT = flags.DEFINE_string("experiment", str(DEFAULT), "experiment file with a CONFIG")
WORKDIR = flags.DEFINE_string("workdir", None, "folder for the call log", required=True)
OVERRIDE = flags.DEFINE_multi_string("override", [], "path.to.field=value, repeatable")
MODEL = flags.DEFINE_string("model", None, "Hugging Face folder; default the experiment's model")
HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen on")
PORT = flags.DEFINE_integer(
    "port", 8321, "port to listen on; 0 = any free one", lower_bound=0, upper_bound=65535
)
KEY = flags.DEFINE_string("key", None, "the key that clients send; default a random one")
METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", None, "port of the engine's Prometheus endpoint; 0 = any free one; default none"
)
METRICS_HOST = flags.DEFINE_string("metrics_host", "127.0.0.1", "address it listens on")
HARNESS = flags.DEFINE_enum(
    "harness", "generic", sorted(HARNESSES), "whose rules tell the roles of calls"
)

LINES = """
Claude Code   ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} \\
              CLAUDE_CODE_ATTRIBUTION_HEADER=0 CLAUDE_CODE_AUTO_COMPACT_WINDOW={window} \\
              claude --model {model}
Codex         PROXY_KEY={key} codex -c model_provider=proxy -c model={model} \\
              -c model_providers.proxy.name=proxy -c model_providers.proxy.base_url={url}/v1 \\
              -c model_providers.proxy.env_key=PROXY_KEY -c model_providers.proxy.wire_api=responses
OpenClaw      in openclaw.json: models.providers.proxy = {{"baseUrl": "{url}/v1", "apiKey": "{key}",
              "api": "openai-responses", "models": [{{"id": "{model}", "name": "{model}",
              "contextWindow": {window}, "maxTokens": {max_tok}}}]}}
OpenAI        OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}
curl          curl {url}/v1/chat/completions -H 'authorization: Bearer {key}' \\
              -H 'content-type: application/json' \\
              -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
"""


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    config = configure(Path(EXPERIMENT.value), OVERRIDE.value)
    if MODEL.value:
        config = override(config, [f"model.path={MODEL.value}"])
    workdir = Path(WORKDIR.value)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(RecordLog(workdir / CALLS))
        # What launch/report.py reads the tokenizer's place from.
        (workdir / "config.json").write_text(json.dumps(to_dict(config), indent=1) + "\n")
        print(f"reading {config.model.path}", flush=True)
        served = open_engine(config, stack)
        served.driver.publish(served.params(), 1)
        if METRICS_PORT.value is not None:
            where = METRICS_PORT.value, METRICS_HOST.value
            metrics = MetricsEndpoint(served.driver, config.engine.slots, *where)
            print(f"metrics: {stack.enter_context(metrics).url}", flush=True)
        trace = asyncio.run(serve(config, served, log))
    print(json.dumps(result(trace)), flush=True)
    return 0


async def serve(config: ExperimentConfig, served: Served, log: RecordLog) -> EpisodeTrace:
    """Until a signal comes."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    episode_id = f"serve-{time.strftime('%Y%m%d-%H%M%S')}"
    proxy = ProxyServer(served.codec, log, config.name, config.rollout.proxy)
    await proxy.start(HOST.value, PORT.value)
    started_at_s = time.time()
    try:
        endpoint = proxy.open_episode(spec_of(config, served, episode_id))
        show(endpoint, proxy.port)
        await ended.wait()
        print("\nending", flush=True)
        trace = await proxy.close_episode(episode_id)
        keep_record(config, episode_id, trace, started_at_s)
        return trace
    finally:
        await proxy.stop()


def keep_record(
    config: ExperimentConfig, episode_id: str, trace: EpisodeTrace, started_at_s: float
) -> None:
    """So that a report knows that it ended; nobody graded it."""
    failed = Outcome.INFRASTRUCTURE if trace.quarantine else Outcome.OK
    record = EpisodeRecord(
        run_id=config.name,
        episode_id=episode_id,
        group_id=episode_id,
        task_id="served",
        harness=HARNESS.value,
        split="serve",
        step=0,
        seed=config.seed,
        outcome=failed,
        detail=trace.quarantine,
        grade=Grade(None, "served to a program of yours: not graded"),
        call_ids=tuple(call.call_id for call in trace.calls),
        timings_s={"model": trace.model_s, "proxy": trace.overhead_s},
        started_at_s=started_at_s,
    )
    with RecordLog(Path(WORKDIR.value) / EPISODES) as log:
        log.append(record)


def spec_of(config: ExperimentConfig, served: Served, episode_id: str) -> EpisodeSpec:
    limits = config.rollout.limits
    return EpisodeSpec(
        episode_id=episode_id,
        harness=make_harness(HARNESS.value),
        sampler=served.driver,
        sampling=SamplingParams(temperature=config.loop.temperature),
        window_tok=min(limits.window_tok, config.engine.window_tok),
        max_tok=limits.max_tok,
        seed=config.seed,
        on_policy=False,
        key=KEY.value or "",
    )


def show(endpoint: Endpoint, port: int) -> None:
    url = endpoint.base_url
    if HOST.value not in ("127.0.0.1", "localhost"):
        host = HOST.value if HOST.value not in ("0.0.0.0", "::") else "THIS-HOST"
        url = url.replace("127.0.0.1", host, 1)
    print(f"serving {endpoint.model} at {url} (health: port {port}, /health); calls go to "
          f"{Path(WORKDIR.value) / CALLS}")  # fmt: skip
    shown = LINES.format(
        url=url,
        key=endpoint.key,
        model=endpoint.model,
        window=endpoint.window_tok,
        max_tok=endpoint.max_tok,
    )
    print(shown)
    if HARNESS.value == "generic":
        print(
            "One conversation at a time is told apart best by its own program's rules: --harness=\n"
            f"{', '.join(sorted(set(HARNESSES) - {'generic'}))}. Sampling is this server's: "
            "--override=loop.temperature=T."
        )
    print(flush=True)


def result(trace: EpisodeTrace) -> dict[str, str | int]:
    return {
        "workdir": WORKDIR.value,
        "calls": len(trace.calls),
        "prompt_tok": trace.ledger.prompt_tok,
        "sampled_tok": sum(call.completion_tok for call in trace.calls),
        "failure": trace.quarantine,
    }


def run() -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        app.run(main)
    except (ClawgymError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    run()

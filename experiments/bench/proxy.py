"""What the proxy adds to a call, beside LiteLLM's proxy in the same run.

    python experiments/bench/proxy.py [--quick] [--litellm=PYTHON_OF_AN_ENVIRONMENT_WITH_LITELLM]

Every call is a turn of a conversation as long as Claude Code's (proxy_parts/talk.py): after ten
turns a body of 90 kB and about 20,000 tokens, of which a tool result of 1.6 kB is new. The engine
answers at once, or after a fixed time.

- one after another: time of a call with ten turns of history, without the tokenizer's time for the
  new text; goal p50 <= 2 ms (JSON and streamed, Anthropic and Chat Completions).
- 300 at once: 300 episodes, each answer held 3 s by the engine, so 100 calls/s; overhead = time of
  a call - 3 s; goal p99 <= 20 ms. The event loop's lag and the memory per open episode are of this
  part; goal <= 2 MB.
- LiteLLM (`litellm[proxy]` from PyPI, one worker): the same bodies to a backend that answers at
  once; its overhead = its time - the time of the same body sent to that backend directly. Ours is
  the time of a call without the tokenizer's, as above. Goal: ours / its <= 1/5. Installed into
  .cache/litellm where --litellm does not name an environment.
- long histories: characters that reach the tokenizer, and its time, per call at 10, 50, 200 turns;
  goal: the time at 200 turns <= 1.5 times that at 10.

The last line is a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import uvloop
from absl import app, flags

from clawgym_jax.config import TINY_BASE
from experiments.bench.proxy_parts import litellm
from experiments.bench.proxy_parts.talk import Talk
from experiments.bench.proxy_parts.wire import Connection, Reply
from experiments.npm_tokenizer import npm_tokenizer

QUICK = flags.DEFINE_bool("quick", False, "fewer calls: within a minute, LiteLLM only if installed")
LITELLM = flags.DEFINE_string("litellm", None, "python of an environment that has litellm[proxy]")
PARTS = Path(__file__).parent / "proxy_parts"
HISTORY_TURNS = 10
HELD_S = 3.0
IN_FLIGHT = 300
SEEDS = itertools.count()


@dataclass
class Ours:
    """The proxy's process."""

    process: asyncio.subprocess.Process
    port: int

    async def tell(self, **command: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())


@contextlib.asynccontextmanager
async def ours(tokenizer: Path) -> AsyncIterator[Ours]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PARTS / "ours.py"),
        str(tokenizer),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    assert process.stdin and process.stdout
    try:
        yield Ours(process, json.loads(await process.stdout.readline())["port"])
    finally:
        process.stdin.close()
        await process.wait()


def body_of(talk: Talk, protocol: str, stream: bool) -> tuple[str, bytes]:
    if protocol == "anthropic":
        return "/v1/messages", talk.anthropic(stream)
    return "/v1/chat/completions", talk.chat(stream)


def hear(talk: Talk, protocol: str, reply: Reply) -> None:
    """Adds an answer that was not streamed to the conversation."""
    answer = json.loads(reply.body)
    if protocol == "anthropic":
        text, use = answer["content"]
        talk.hear(text["text"], use["id"], use["name"], json.dumps(use["input"]))
    else:
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]
        function = call["function"]
        talk.hear(message["content"], call["id"], function["name"], function["arguments"])


async def speak(
    connection: Connection, where: dict[str, Any], talk: Talk, protocol: str, stream: bool = False
) -> Reply:
    path, body = body_of(talk, protocol, stream)
    reply = await connection.post(where["path"] + path, body, where["key"])
    assert reply.status == 200, reply.body[:300]
    return reply


async def one_after_another(
    server: Ours, protocol: str, stream: bool, episodes: int
) -> dict[str, Any]:
    """The call with ten turns of history, and that call's share of the tokenizer."""
    connection = await Connection("127.0.0.1", server.port).open()
    seconds: list[float] = []
    encode_s: list[float] = []
    size = 0
    for where in await server.tell(open=episodes):
        talk = Talk(next(SEEDS))  # texts that no cache has seen
        for _ in range(HISTORY_TURNS):
            hear(talk, protocol, await speak(connection, where, talk, protocol))
        before = await server.tell(measure=True)
        size = len(body_of(talk, protocol, stream)[1])
        seconds.append((await speak(connection, where, talk, protocol, stream)).seconds)
        after = await server.tell(measure=True)
        encode_s.append(after["encode_s"] - before["encode_s"])
    await server.tell(close=True)
    await connection.close()
    beyond = [1e3 * (s - e) for s, e in zip(seconds, encode_s, strict=True)]
    return {
        "part": "one after another",
        "protocol": protocol,
        "stream": stream,
        "body_bytes": size,
        "calls": len(seconds),
        "p50_ms": round(1e3 * statistics.median(seconds), 2),
        "tokenizer_ms": round(1e3 * statistics.median(encode_s), 2),
        "beyond_p50_ms": round(statistics.median(beyond), 2),
        "beyond_p99_ms": round(percentile(beyond, 0.99), 2),
    }


async def many_at_once(server: Ours, turns: int) -> dict[str, Any]:
    """300 episodes whose answers the engine holds for 3 s."""
    before = await server.tell(measure=True)
    places = await server.tell(open=IN_FLIGHT)
    await server.tell(hold_s=HELD_S)
    talks = [Talk(next(SEEDS)) for _ in range(IN_FLIGHT)]
    over: list[float] = []
    lag_s: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0.005)
            lag_s.append(time.perf_counter() - before_s - 0.005)

    async def play(index: int) -> None:
        await asyncio.sleep(HELD_S * index / IN_FLIGHT)
        connection = await Connection("127.0.0.1", server.port).open()
        talk = talks[index]
        for turn in range(turns):
            reply = await speak(connection, places[index], talk, "anthropic")
            hear(talk, "anthropic", reply)
            if turn:  # the first one brings a whole new prompt
                over.append(1e3 * (reply.seconds - HELD_S))
        await connection.close()

    started_s = time.perf_counter()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(play(index) for index in range(IN_FLIGHT)))
    took_s = time.perf_counter() - started_s
    watching.cancel()
    after = await server.tell(measure=True)
    await server.tell(hold_s=0.0)
    await server.tell(close=True)
    return {
        "part": "300 at once",
        "calls_per_s": round(IN_FLIGHT * turns / took_s, 1),
        "p50_ms": round(statistics.median(over), 2),
        "p99_ms": round(percentile(over, 0.99), 2),
        "lag_p50_ms": round(1e3 * after["lag_p50_s"], 2),
        "lag_p99_ms": round(1e3 * after["lag_p99_s"], 2),
        "lag_max_ms": round(1e3 * after["lag_max_s"], 2),
        "load_lag_p99_ms": round(1e3 * percentile(lag_s, 0.99), 2),  # of the load itself
        "episode_mb": round((after["rss_bytes"] - before["rss_bytes"]) / IN_FLIGHT / 1e6, 3),
        "turns": turns,
    }


async def long_histories(server: Ours, episodes: int) -> list[dict[str, Any]]:
    """What reaches the tokenizer, by length of the history."""
    connection = await Connection("127.0.0.1", server.port).open()
    marks = (10, 50, 200)
    seen: dict[int, list[tuple[float, float, float]]] = {mark: [] for mark in marks}
    for where in await server.tell(open=episodes):
        talk = Talk(next(SEEDS))
        for turn in range(1, max(marks) + 2):
            near = next((m for m in marks if m <= turn - 1 < m + 5), None)
            before = await server.tell(measure=True) if near else None
            reply = await speak(connection, where, talk, "anthropic")
            if near and before:
                after = await server.tell(measure=True)
                chars = after["encoded_chars"] - before["encoded_chars"]
                seen[near].append((chars, after["encode_s"] - before["encode_s"], reply.seconds))
            hear(talk, "anthropic", reply)
    await server.tell(close=True)
    await connection.close()
    return [
        {
            "part": "long histories",
            "turns": mark,
            "encoded_chars": round(statistics.median(s[0] for s in seen[mark])),
            "tokenizer_ms": round(1e3 * statistics.median(s[1] for s in seen[mark]), 3),
            "call_ms": round(1e3 * statistics.median(s[2] for s in seen[mark]), 2),
        }
        for mark in marks
    ]


async def against_litellm(server: Ours, python: Path, calls: int) -> dict[str, Any]:
    """The same bodies, in turn: ours, LiteLLM, LiteLLM's backend directly."""
    times: dict[str, list[float]] = {"ours": [], "litellm": [], "backend": []}
    before = await server.tell(measure=True)
    async with litellm.servers(python) as (port, backend_port):
        ports = {"ours": server.port, "litellm": port, "backend": backend_port}
        lines = {name: await Connection("127.0.0.1", p).open() for name, p in ports.items()}
        done = 0
        for where in await server.tell(open=-(-calls // HISTORY_TURNS)):
            talk = Talk(next(SEEDS))
            for _ in range(HISTORY_TURNS):
                _, body = body_of(talk, "chat", False)
                for name in ("litellm", "backend"):
                    reply = await lines[name].post("/v1/chat/completions", body, litellm.KEY)
                    assert reply.status == 200, reply.body[:300]
                    times[name].append(reply.seconds)
                reply = await speak(lines["ours"], where, talk, "chat")
                times["ours"].append(reply.seconds)
                hear(talk, "chat", reply)
                done += 1
        for line in lines.values():
            await line.close()
    after = await server.tell(measure=True)
    await server.tell(close=True)
    tokenizer_s = (after["encode_s"] - before["encode_s"]) / done
    warm = {name: statistics.median(values[HISTORY_TURNS:]) for name, values in times.items()}
    return {
        "part": "LiteLLM",
        "calls": done,
        "ours_ms": round(1e3 * warm["ours"], 2),
        "tokenizer_ms": round(1e3 * tokenizer_s, 2),
        "litellm_ms": round(1e3 * warm["litellm"], 2),
        "backend_ms": round(1e3 * warm["backend"], 2),
        "litellm_overhead_ms": round(1e3 * (warm["litellm"] - warm["backend"]), 2),
        "ratio": round((warm["ours"] - tokenizer_s) / (warm["litellm"] - warm["backend"]), 3),
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def goals(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    by_part: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    for row in by_part["one after another"]:
        name = f"p50 ms beyond the tokenizer, {row['protocol']}, stream {row['stream']}"
        yield goal(name, row["beyond_p50_ms"], 2.0)
    (load,) = by_part["300 at once"]
    yield goal("p99 ms at 100 calls/s, 300 in flight", load["p99_ms"], 20.0)
    yield goal("MB per open episode", load["episode_mb"], 2.0)
    short, *_, long = by_part["long histories"]
    ratio = round(long["tokenizer_ms"] / short["tokenizer_ms"], 2)
    yield goal("tokenizer time at 200 turns / at 10", ratio, 1.5)
    for row in by_part.get("LiteLLM", ()):
        yield goal("our overhead / LiteLLM's", row["ratio"], 0.2)


def goal(name: str, value: float, at_most: float) -> dict[str, Any]:
    return {"name": name, "value": value, "goal": at_most, "ok": value <= at_most}


async def measure(quick: bool) -> list[dict[str, Any]]:
    found = npm_tokenizer()
    tokenizer = found if isinstance(found, Path) else TINY_BASE
    if not isinstance(found, Path):
        print(f"{found}; with the tiny tokenizer instead", file=sys.stderr)
    python = litellm.environment(LITELLM.value, install=not quick)
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    async with ours(tokenizer) as server:
        await one_after_another(server, "chat", False, 3)  # warm up
        for protocol in ("anthropic", "chat"):
            for stream in (False, True):
                show(await one_after_another(server, protocol, stream, 15 if quick else 100))
        for row in await long_histories(server, 1 if quick else 4):
            show(row)
    async with ours(tokenizer) as server:  # memory of a fresh process
        await one_after_another(server, "chat", False, 3)
        show(await many_at_once(server, 4 if quick else 11))
    if python is None:
        print("no LiteLLM: run without --quick, or name one by --litellm", file=sys.stderr)
    else:
        async with ours(tokenizer) as server:
            show(await against_litellm(server, python, 50 if quick else 300))
    return rows


def main(_: list[str]) -> None:
    rows = uvloop.run(measure(QUICK.value))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    result = {
        "bench": "proxy",
        "machine": {**machine, "commit": commit},
        "rows": rows,
        "goals": list(goals(rows)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

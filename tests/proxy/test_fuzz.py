"""10,000 damaged requests over kept connections, many at once: nothing may break, nothing be lost.

A failure names the seed and the request's number: FUZZ_SEED=... FUZZ_ONLY=... runs that one alone.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from clawgym_jax.core.interfaces import Endpoint
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import CallRecord, Completion, SamplingParams
from clawgym_jax.proxy import EpisodeSpec, ProxyConfig, ProxyServer
from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.openai_responses import OpenAIResponses
from clawgym_jax.proxy.turns import Answer, Turn
from tests.proxy.mutations import VALID, damaged
from tests.proxy.raw_http import RawClient, Reply, Wire
from tests.proxy.sse import events_of
from tests.proxy.support import AnyHarness, Asked, ScriptedEngine, call_text, completion, tiny_codec

SEED = int(os.environ.get("FUZZ_SEED", "20261129"))
REQUESTS, CONNECTIONS, EPISODES = 10_000, 16, 40
HANG_S = 60.0
CONFIG = ProxyConfig(settle_interval_s=0.002, keepalive_s=0.05, max_body_bytes=150_000)
SAID = (
    "ok",
    "",
    "<think>\nhm\n</think>\n\nok",
    call_text("look", {"path": "ä"}),
    "So.\n" + call_text("look", '{"path": }'),
    call_text("patch", {"input": "+x"}),
)
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
PROTOCOLS = {
    protocol.name: protocol for protocol in (AnthropicMessages(), OpenAIChat(), OpenAIResponses())
}


def spoken(asked: Asked) -> Completion:
    """One thing or another."""
    codec = tiny_codec()
    said = SAID[asked.params.seed % len(SAID)]
    return completion(codec.encode_rendered(said + codec.end_of_turn).tolist())


@dataclass
class Findings:
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    answered: set[str] = field(default_factory=set)  # ids that answers carried


def check(wire: Wire, reply: Reply, findings: Findings) -> None:
    """The reply is a good answer, or an error in the shape of its protocol."""
    findings.statuses[reply.status] += 1
    assert reply.status < 500, reply.body[:300]
    if wire.method == "HEAD":
        return
    if reply.status != 200:
        assert reply.status in (400, 401, 404, 405, 413, 415)
        check_error(wire, json.loads(reply.body))
    elif reply.headers["content-type"].startswith("text/event-stream"):
        events = events_of(reply.body)
        assert events[-1].get("type") in LAST_EVENTS or reply.body.endswith(b"data: [DONE]\n\n")
        first = events[0].get("message") or events[0].get("response") or events[0]
        findings.answered.add(first["id"])
    else:
        body = json.loads(reply.body)
        kind = body.get("object", body.get("type"))
        if kind in ("message", "chat.completion", "response"):
            findings.answered.add(body["id"])
        else:
            assert "input_tokens" in body or kind in ("list", "model") or body["ok"]


def check_error(wire: Wire, body: dict[str, dict[str, str]]) -> None:
    error = body["error"]
    assert error["message"] and error["type"]
    path = wire.path.partition("?")[0]
    if re.fullmatch(r"/e/ep\d+/v1/messages(/count_tokens)?", path):
        assert body["type"] == "error"
    elif re.fullmatch(r"/e/ep\d+/v1/(chat/completions|responses)", path):
        assert set(error) == {"message", "type", "param", "code"}


async def fuzz(proxy: ProxyServer, endpoints: list[Endpoint], numbers: list[int]) -> Findings:
    findings = Findings()

    async def work(lane: int) -> None:
        client = RawClient(proxy.port)
        try:
            for number in numbers[lane::CONNECTIONS]:
                await one(client, number)
        finally:
            await client.close()

    async def one(client: RawClient, number: int) -> None:
        rng = random.Random(f"{SEED}/{number}")
        episode = number * EPISODES // REQUESTS
        wire = damaged(rng, f"/e/ep{episode}", endpoints[episode].key)
        try:
            if rng.random() < 0.01:
                whole = len(wire.head() + wire.body)
                await client.leave(wire, rng.randrange(whole))
            else:
                check(wire, await asyncio.wait_for(client.ask(wire), HANG_S), findings)
        except Exception as error:
            what = f"{error!r}\nFUZZ_SEED={SEED} FUZZ_ONLY={number}\n"
            shown = f"{wire.method} {wire.path} {wire.headers}\n{wire.body[:3000]!r}"
            raise AssertionError(what + shown) from error

    async with asyncio.TaskGroup() as lanes:
        for lane in range(CONNECTIONS):
            lanes.create_task(work(lane))
    return findings


def id_of(call: CallRecord) -> str:
    """The id that the answer to a call carries."""
    user = {"role": "user", "content": "x"}
    protocol = PROTOCOLS[call.protocol]
    request = protocol.parse({"messages": [user], "input": [user]}, {})
    answer = Answer(call.call_id, Turn("assistant"), "stop", None, 1, 1, 0)
    return str(protocol.message(request, answer)["id"])


def spec_of(n: int) -> EpisodeSpec:
    engine = ScriptedEngine(tiny_codec(), [spoken] * REQUESTS)
    return EpisodeSpec(f"ep{n}", AnyHarness(), engine, SamplingParams(), 8192, 64, n)


async def run(log_path: Path, numbers: list[int]) -> None:
    with RecordLog(log_path) as log:
        proxy = ProxyServer(tiny_codec(), log, "run", CONFIG)
        await proxy.start()
        try:
            endpoints = [proxy.open_episode(spec_of(n)) for n in range(EPISODES + 1)]
            findings = await fuzz(proxy, endpoints, numbers)
            fresh = await valid_requests(proxy, endpoints[EPISODES])
            traces = [await proxy.close_episode(f"ep{n}") for n in range(EPISODES + 1)]
        finally:
            await proxy.stop()
    print(f"seed {SEED}: {sorted(findings.statuses.items())}, {len(findings.answered)} answers")
    calls = read_calls(log_path)
    assert not any(trace.quarantine for trace in traces)
    assert sum(len(trace.calls) for trace in traces) == len(calls)
    assert sorted(map(id_of, calls)) == sorted(findings.answered | fresh)
    if len(numbers) == REQUESTS:
        assert findings.statuses[200] > REQUESTS // 10
        assert all(findings.statuses[status] for status in (400, 401, 404, 405, 413, 415))


async def valid_requests(proxy: ProxyServer, endpoint: Endpoint) -> set[str]:
    """A fresh episode still works; ids of its answers."""
    findings = Findings()
    client = RawClient(proxy.port)
    for path, body in VALID.items():
        for stream in (False, True):
            raw = json.dumps({**body, "stream": stream}).encode()
            headers = (("x-api-key", endpoint.key),)
            wire = Wire("POST", f"/e/ep{EPISODES}{path}", headers, raw)
            reply = await client.ask(wire)
            assert reply.status == 200, reply.body
            check(wire, reply, findings)
    await client.close()
    assert client.opened == 1 and len(findings.answered) == 6
    return findings.answered


def test_damaged_requests() -> None:
    only = os.environ.get("FUZZ_ONLY")
    numbers = [int(only)] if only else list(range(REQUESTS))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder) / "log", numbers))

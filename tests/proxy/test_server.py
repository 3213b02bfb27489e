"""HTTP edges: shapes of refusals, probes, sockets, the life of the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import SamplingParams
from clawgym_jax.proxy import EpisodeSpec, ProxyServer
from tests.proxy.support import (
    FAST,
    LOOK,
    AnyHarness,
    ScriptedEngine,
    Stage,
    stage,
    tiny_codec,
)

USER = {"role": "user", "content": "Do it."}


async def post(s: Stage, path: str, content: bytes | str) -> httpx.Response:
    return await s.http.post(f"{s.endpoint.base_url}{path}", content=content, headers=s.auth)


BAD_BODIES: list[Any] = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"{}",
    json.dumps({"messages": "hello"}).encode(),
    json.dumps({"messages": []}).encode(),
    json.dumps({"messages": [{"role": "system", "content": "only"}]}).encode(),
    json.dumps({"messages": [3]}).encode(),
    json.dumps({"messages": [{"role": "judge", "content": "x"}]}).encode(),
    json.dumps({"messages": [{"role": "user", "content": 3}]}).encode(),
    json.dumps({"messages": [{"role": "user", "content": [{"type": "text"}]}]}).encode(),
    json.dumps({"messages": [USER], "max_tokens": 0}).encode(),
    json.dumps({"messages": [USER], "tools": [{"nameless": 1}]}).encode(),
    b"[" * 200_000,
]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_malformed_requests_are_answered_in_the_protocols_shape(path: str) -> None:
    async def run() -> None:
        async with stage() as s:
            for body in BAD_BODIES:
                response = await post(s, path, body)
                assert response.status_code == 400, (body[:80], response.text)
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert "expected" in error["message"] and "got" in error["message"]
                assert ("type" in response.json()) == (path == "/v1/messages")
            assert not s.engine.asked

    asyncio.run(run())


def test_unknown_paths_say_what_there_is() -> None:
    async def run() -> None:
        async with stage() as s:
            response = await post(s, "/v1/embeddings", b"{}")
            assert response.status_code == 404
            assert "/v1/chat/completions" in response.json()["error"]["message"]

    asyncio.run(run())


def test_health_needs_no_key() -> None:
    async def run() -> None:
        async with stage() as s:
            assert (await s.http.get(s.proxy.origin + "/health")).json()["episodes"] == 1
            assert (await s.http.head(s.endpoint.base_url + "x/api/hello")).status_code == 404

    asyncio.run(run())


def test_paths_without_v1_are_served_too() -> None:
    async def run() -> None:
        async with stage("a") as s:
            body = json.dumps({"model": "m", "messages": [USER]})
            assert (await post(s, "/chat/completions", body)).status_code == 200

    asyncio.run(run())


def test_odd_values_do_not_reach_the_log_or_the_tokenizer() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}

    async def run() -> None:
        async with stage("a", "b") as s:
            raw = '{"messages":[{"role":"user","content":"half \\ud800 pair \\ud83d\\ude42"}]}'
            assert (await post(s, "/v1/chat/completions", raw)).status_code == 200
            more = {"seed": 10**40, "logit_bias": deep, "temperature": 1e308}
            assert (await s.chat([USER], **more)).status_code == 200
            one, two = (await s.proxy.close_episode("ep")).calls
            assert "half � pair 🙂" in tiny_codec().decode(one.prompt_ids)
            assert two.requested["seed"] == str(10**40)

    asyncio.run(run())


def test_tool_fields_that_the_model_does_not_need_are_left_out() -> None:
    async def run() -> None:
        async with stage("a", "b") as s:
            strict = {**LOOK, "function": {**LOOK["function"], "strict": True}}  # type: ignore[dict-item]
            await s.chat([USER], tools=[LOOK])
            await s.chat([USER], tools=[strict])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert one.prompt_ids.tolist() == two.prompt_ids.tolist()

    asyncio.run(run())


def test_unix_socket_in_a_private_folder() -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder, RecordLog(Path(folder) / "log") as log:
            sockets = Path(folder) / "s"
            proxy = ProxyServer(tiny_codec(), log, "run", FAST)
            await proxy.start(socket_dir=sockets)
            assert stat.S_IMODE(os.stat(sockets).st_mode) == 0o700
            transport = httpx.AsyncHTTPTransport(uds=str(sockets / "proxy.sock"))
            async with httpx.AsyncClient(transport=transport) as http:
                assert (await http.get("http://proxy/health")).json()["ok"] is True
            await proxy.stop()
            assert not (sockets / "proxy.sock").exists()

    asyncio.run(run())


def test_too_long_a_socket_path_is_said_so() -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder, RecordLog(Path(folder) / "log") as log:
            proxy = ProxyServer(tiny_codec(), log, "run")
            with pytest.raises(ConfigError, match="108"):
                await proxy.start(socket_dir=Path(folder) / ("d" * 100))
            await proxy.stop()

    asyncio.run(run())


def test_signal_handlers_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    async def run() -> tuple[Any, Any]:
        async with stage():
            return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    during = asyncio.run(run())
    assert during[1] == before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_episodes_do_not_see_each_other() -> None:
    async def run() -> None:
        async with stage("a") as s:
            spec = EpisodeSpec(
                "other", AnyHarness(), ScriptedEngine(tiny_codec(), []), SamplingParams(), 99, 9
            )
            other = s.proxy.open_episode(spec)
            with pytest.raises(ConfigError, match="open already"):
                s.proxy.open_episode(spec)
            body = json.dumps({"model": "m", "messages": [USER]})
            url = other.base_url + "/v1/chat/completions"
            assert (await s.http.post(url, content=body, headers=s.auth)).status_code == 401
            assert other.key != s.endpoint.key
            assert (await s.proxy.close_episode("other")).calls == ()
            assert (await s.http.post(url, content=body, headers=s.auth)).status_code == 404

    asyncio.run(run())

"""How the tiny programs behave on a bad connection, and what their start costs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from clawgym_jax.core.interfaces import Endpoint, Harness, LaunchPlan
from clawgym_jax.harness.tiny_chat import TinyChat
from clawgym_jax.harness.tiny_shell import TinyShell

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
SLOW_MODULES = {"socket", "ssl", "http.client", "urllib.request", "email", "typing", "asyncio",
                "subprocess", "dataclasses", "logging", "argparse"}  # fmt: skip


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


def events(*values: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


def answer_of(harness: Harness) -> bytes:
    if harness.protocol == "anthropic":
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": "dö"}
        usage = {"input_tokens": 1, "output_tokens": 1}
        return events(
            {"type": "message_start", "message": {}},
            {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
            {"type": "message_stop"},
        )
    return (
        b": hello\n\n"
        + events(
            {"choices": [{"delta": {"content": "d"}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": "ö"}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        )
        + b"data: [DONE]\n\n"
    )


async def converse(harness: Harness, responses: list[bytes]) -> tuple[int, str, list[bytes]]:
    """(exit status, output, requests) of a program against canned bytes, one per connection."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        requests.append(head + await reader.readexactly(size))
        writer.write(responses.pop(0))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        async with server:
            process = await launch(harness, f"http://127.0.0.1:{port}/e/x", home)
            out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, (out + err).decode(), requests


def install(harness: Harness, url: str, home: str) -> LaunchPlan:
    plan = harness.launch(Endpoint(url, "key"), "Do it.", "/", home)
    for name, content in plan.files.items():
        (Path(home) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(home) / name).write_bytes(content)
    return plan


async def launch(harness: Harness, url: str, home: str) -> asyncio.subprocess.Process:
    plan = install(harness, url, home)
    return await asyncio.create_subprocess_exec(
        *plan.argv,
        env={"PATH": os.environ["PATH"], **plan.env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


both = pytest.mark.parametrize("harness", [TinyChat(), TinyShell()], ids=lambda h: h.name)


@both
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streams_in_any_pieces(harness: Harness, size: int) -> None:
    status, out, requests = asyncio.run(
        converse(harness, [HEAD + chunked(answer_of(harness), size)])
    )
    assert (status, out, len(requests)) == (0, "dö\n", 1)


@both
def test_bad_answers_are_asked_for_again_with_the_same_body(harness: Harness) -> None:
    whole = HEAD + chunked(answer_of(harness), 50)
    unfinished = HEAD + chunked(answer_of(harness)[:-40], 50)  # a complete body, no final event
    refused = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
    for first in (b"", whole[: len(HEAD) + 60], refused, whole[:-8], unfinished):
        status, out, requests = asyncio.run(converse(harness, [first, whole]))
        assert (status, out, len(requests)) == (0, "dö\n", 2), first
        bodies = [request.partition(b"\r\n\r\n")[2] for request in requests]
        assert bodies[0] == bodies[1]
        counts = [b"x-stainless-retry-count: 1" in request for request in requests]
        assert counts == [False, harness.protocol == "openai-chat"]


@both
def test_a_refusal_is_not_sent_again(harness: Harness) -> None:
    refused = b"HTTP/1.1 400 Bad\r\nContent-Length: 8\r\n\r\ntoo long"
    status, out, requests = asyncio.run(converse(harness, [refused]))
    assert status == 1 and "too long" in out and len(requests) == 1


@both
def test_a_start_loads_few_modules(harness: Harness) -> None:
    """Up to its first request. What it costs in time: experiments/bench/overhead.py."""
    with tempfile.TemporaryDirectory() as home:
        plan = install(harness, "http://127.0.0.1:9/e/x", home)
        config = next(Path(home).glob(".tiny_*/config.json"))
        config.write_text(json.dumps({**json.loads(config.read_text()), "attempts": 1}))
        python, *rest = plan.argv
        argv = [python, "-X", "importtime", *rest]
        env = {"PATH": os.environ["PATH"], **plan.env}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # nobody listens there
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert {"json", "tiny_http"} <= loaded
    assert not loaded & SLOW_MODULES

"""The forwarder passes bytes on untouched, both ways, many at once, and ends of streams too."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from clawgym_jax.sandbox.local import PROGRAMS

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
FORWARD = str(PROGRAMS / "forward.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def forwarded(tmp_path: Path, handler: Handler) -> AsyncIterator[int]:
    """The port that leads to `handler` behind a unix socket."""
    port, path = free_port(), str(tmp_path / "s")
    async with await asyncio.start_unix_server(handler, path):
        forwarder = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", FORWARD, str(port), path
        )
        try:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await writer.wait_closed()
                    break
                await asyncio.sleep(0.02)
            yield port
        finally:
            forwarder.terminate()
            await forwarder.wait()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(10_000):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def send_and_receive(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for start in range(0, len(data), 50_000):
            writer.write(data[start : start + 50_000])
            await writer.drain()
        writer.write_eof()

    _, received = await asyncio.gather(send(), reader.read(-1))
    writer.close()
    await writer.wait_closed()
    return received


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_bytes_come_back_as_they_were_sent(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        data = random.Random(size).randbytes(size)
        async with forwarded(tmp_path, echo) as port:
            assert await send_and_receive(port, data) == data

    asyncio.run(main())


def test_connections_do_not_mix(tmp_path: Path) -> None:
    async def main() -> None:
        payloads = [hashlib.sha256(b"%d" % i).digest() * 4000 for i in range(30)]
        async with forwarded(tmp_path, echo) as port:
            received = await asyncio.gather(*(send_and_receive(port, p) for p in payloads))
            assert received == payloads

    asyncio.run(main())


def test_a_client_that_goes_away_is_seen_by_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(5) == b"hello":
                await reader.read(-1)
                gone.set()
            writer.close()

        async with forwarded(tmp_path, wait_for_end) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            await writer.drain()
            await asyncio.sleep(0.1)
            assert not gone.is_set()
            writer.transport.abort()
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(main())


def test_a_reader_that_stalls_does_not_make_it_hoard(tmp_path: Path) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            if await reader.read(5) == b"start":
                for _ in range(1000):
                    writer.write(b"x" * 100_000)
                    await writer.drain()
                    sent += 100_000
        writer.close()

    async def main() -> None:
        async with forwarded(tmp_path, flood) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(b"start")
                await asyncio.sleep(0.7)
                assert 0 < sent < 20_000_000

    asyncio.run(main())


def test_a_dead_proxy_is_a_closed_connection_not_a_hang(tmp_path: Path) -> None:
    async def main() -> None:
        async with forwarded(tmp_path, echo) as port:
            os.rename(tmp_path / "s", tmp_path / "moved")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(-1), 5) == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            os.rename(tmp_path / "moved", tmp_path / "s")
            assert await send_and_receive(port, b"back") == b"back"

    asyncio.run(main())


def test_idle_connections_cost_no_cpu(tmp_path: Path) -> None:
    async def main() -> None:
        measured, closed = asyncio.Event(), asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(-1)
            await measured.wait()  # half closed, and still to be answered
            writer.close()
            await writer.wait_closed()
            closed.set()

        port, path = free_port(), str(tmp_path / "s")
        async with await asyncio.start_unix_server(hold, path):
            forwarder = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", FORWARD, str(port), path
            )
            await asyncio.sleep(0.4)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"asked")
            writer.write_eof()
            before = cpu_ticks(forwarder.pid)
            await asyncio.sleep(0.8)
            assert cpu_ticks(forwarder.pid) - before <= 5
            measured.set()
            await closed.wait()
            writer.close()
            await writer.wait_closed()
            forwarder.terminate()
            await forwarder.wait()

    asyncio.run(main())


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])

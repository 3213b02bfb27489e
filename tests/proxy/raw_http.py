"""An HTTP/1.1 client that sends whatever it is given, over one connection that is kept alive."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wire:
    """A request as it goes over the wire."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def head(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: x"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, f"content-length: {len(self.body)}", "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class RawClient:
    """Opens a connection again where the server closed it."""

    port: int
    opened: int = 0
    _reader: asyncio.StreamReader | None = field(default=None, repr=False)
    _writer: asyncio.StreamWriter | None = field(default=None, repr=False)

    async def ask(self, wire: Wire) -> Reply:
        reader, writer = await self._connection()
        writer.write(wire.head() + wire.body)
        with contextlib.suppress(ConnectionError):  # refused early: the answer is there already
            await writer.drain()
        reply = await _read_reply(reader, wire.method)
        if reply.headers.get("connection") == "close":
            await self.close()
        return reply

    async def leave(self, wire: Wire, sent_bytes: int) -> None:
        """Goes away in the middle of a request."""
        _, writer = await self._connection()
        writer.write((wire.head() + wire.body)[:sent_bytes])
        await self.close()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            self._reader = self._writer = None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            await self.close()
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=1 << 22
            )
            self.opened += 1
        return self._reader, self._writer


async def _read_reply(reader: asyncio.StreamReader, method: str) -> Reply:
    status = 100
    while status == 100:  # an answer to "expect: 100-continue"
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in pairs}
    if method == "HEAD":
        return Reply(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Reply(status, headers, await _read_chunks(reader))
    if "content-length" in headers:
        return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Reply(status, headers, await reader.read())


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body

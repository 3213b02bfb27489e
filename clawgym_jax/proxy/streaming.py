"""Writes answers to clients, and notices when a client goes away.

Pseudo-streaming: headers and a first event at once, signs of life while the engine works, then the
whole event life cycle of the finished answer. Not here: what the events are (protocol files).
Invariant: 'delivered' is said exactly when the last event was written and the client still stood.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive, Send

from clawgym_jax.proxy.faults import FaultKind, RequestFault
from clawgym_jax.proxy.flight import Flight
from clawgym_jax.proxy.protocol import WireProtocol, dump
from clawgym_jax.proxy.turns import Answer, Request

_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_JSON = {"content-type": "application/json"}


class Client:
    """The connection that waits for one answer. Use as an async context."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self.send = send
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Client:
        self._watch = asyncio.get_running_loop().create_task(self._until_gone())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()  # it ends with the next turn of the loop
        self._watch = None  # its exception knows us: no cycle for the collector to find

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    @property
    def gone(self) -> bool:
        return self._watch is not None and self._watch.done()

    async def wait(self, task: asyncio.Task[Answer], timeout_s: float | None) -> None:
        """Until the task is done, the client is gone or the time is over."""
        assert self._watch is not None
        both = {task, self._watch}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, status: int, body: bytes, headers: Mapping[str, str] = _JSON) -> None:
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.write(body)


async def answer_whole(
    client: Client, protocol: WireProtocol, request: Request, flight: Flight
) -> None:
    """One JSON body when the sample is there."""
    await client.wait(flight.task, None)
    if not flight.done:
        return
    try:
        answer = flight.task.result()
    except (RequestFault, asyncio.CancelledError) as error:
        fault = _fault(error)
        await client.reply(fault.kind.status, dump(protocol.error(fault)))
    else:
        await client.reply(200, dump(protocol.message(request, answer)))
        if not client.gone:
            flight.delivered()
    await client.finish()


async def answer_stream(
    client: Client, protocol: WireProtocol, request: Request, flight: Flight, keepalive_s: float
) -> None:
    """Server-sent events."""
    await client.start(200, _SSE)
    await client.write(protocol.stream_start(request, flight.call_id, flight.prompt_tok))
    while not flight.done:
        await client.wait(flight.task, keepalive_s)
        if client.gone:
            return
        if not flight.done:
            await client.write(protocol.keepalive)
    try:
        answer = flight.task.result()
    except (RequestFault, asyncio.CancelledError) as error:
        await client.write(protocol.stream_error(request, flight.call_id, _fault(error)))
    else:
        await client.write(b"".join(protocol.stream_events(request, answer)))
        if not client.gone:
            flight.delivered()
    await client.finish()


def _fault(error: BaseException) -> RequestFault:
    if isinstance(error, RequestFault):
        return error
    return RequestFault(FaultKind.OVERLOADED, "the episode was closed while this call was sampled")

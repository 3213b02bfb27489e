"""Everything under one episode's URL prefix: keys, paths, protocols, refusals.

Not here: sockets and the life of the server (server.py), bodies (bodies.py), prompts (session.py).
A further protocol is one more entry in `_PROTOCOLS`.
Invariant: every refusal has the shape of the protocol that was spoken.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Iterator, Mapping

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.bodies import read_json
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.faults import FaultKind, RequestFault, invalid
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.openai_responses import OpenAIResponses
from clawgym_jax.proxy.prepared import Prepared
from clawgym_jax.proxy.probes import OPEN_PATHS, answer_probe, is_known
from clawgym_jax.proxy.protocol import WireProtocol, dump
from clawgym_jax.proxy.session import Session
from clawgym_jax.proxy.streaming import Client, answer_stream, answer_whole
from clawgym_jax.proxy.turns import Request

_ANTHROPIC, _CHAT, _RESPONSES = AnthropicMessages(), OpenAIChat(), OpenAIResponses()
_PROTOCOLS: Mapping[str, WireProtocol] = {
    "messages": _ANTHROPIC,
    "messages/count_tokens": _ANTHROPIC,
    "chat/completions": _CHAT,
    "responses": _RESPONSES,
    "responses/input_tokens": _RESPONSES,
}
_COUNTS: Mapping[str, Mapping[str, str]] = {  # what an answer has besides the count
    "messages/count_tokens": {},
    "responses/input_tokens": {"object": "response.input_tokens"},
}
_ODD_FORM = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_ENDPOINTS = ", ".join(f"/v1/{name}" for name in _PROTOCOLS)


class EpisodeApp:
    """An ASGI application."""

    def __init__(self, sessions: Mapping[str, Session], config: ProxyConfig) -> None:
        self._sessions = sessions
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        try:
            await self._serve(http, receive, send)
        except RequestFault as fault:
            await refuse(http, fault, receive, send)
        except ClientDisconnect:
            return  # gone before the request was complete: nothing was sampled
        except Exception as error:
            ours = RequestFault(FaultKind.INTERNAL, f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the answer may have begun
                await refuse(http, ours, receive, send)

    async def _serve(self, http: HttpRequest, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        path = _path_of(http)
        session = self._session(http.path_params["episode"])
        looks = http.method in ("GET", "HEAD")
        if not (looks and path in OPEN_PATHS):
            _require_key(http, session)
        if looks and is_known(path):
            await _reply(answer_probe(path), http, receive, send)
            return
        protocol = _PROTOCOLS.get(path)
        if protocol is None:
            raise RequestFault(
                FaultKind.NOT_FOUND, f"expected POST to one of {_ENDPOINTS}, got {_asked(http)}"
            )
        if http.method != "POST":
            raise RequestFault(FaultKind.METHOD, f"expected POST, got {_asked(http)}")
        with _unforeseen_forms():
            if path in _COUNTS:
                counted = await session.count_tokens(await self._read(http, protocol))
                count = {**_COUNTS[path], "input_tokens": counted}
                await _reply(count, http, receive, send)
                return
            # The request has no name here: most of it is let go before it is sampled.
            prepared = await session.prepare(await self._read(http, protocol))
        await self._answer(prepared, protocol, session, Client(receive, send), started_s)

    async def _read(self, http: HttpRequest, protocol: WireProtocol) -> Request:
        body = await read_json(http, self._config.max_body_bytes)
        return protocol.parse(body, dict(http.headers))

    async def _answer(
        self,
        prepared: Prepared,
        protocol: WireProtocol,
        session: Session,
        client: Client,
        started_s: float,
    ) -> None:
        flight = session.submit(prepared)
        request = prepared.request
        submitted_s = time.perf_counter()
        try:
            async with client:
                if request.stream:
                    keepalive_s = self._config.keepalive_s
                    await answer_stream(client, protocol, request, flight, keepalive_s)
                else:
                    await answer_whole(client, protocol, request, flight)
        finally:
            flight.detach()
            session.overhead_s += submitted_s - started_s
            if flight.done_s:
                session.overhead_s += time.perf_counter() - max(flight.done_s, submitted_s)

    def _session(self, episode_id: str) -> Session:
        session = self._sessions.get(episode_id)
        if session is None:
            raise RequestFault(
                FaultKind.NOT_FOUND,
                f"expected the id of an open episode, got {episode_id!r}; it was never opened "
                "or is closed already",
            )
        return session


async def refuse(http: HttpRequest, fault: RequestFault, receive: Receive, send: Send) -> None:
    """An error in the words of the protocol that the request speaks."""
    headers = {"allow": "POST"} if fault.kind is FaultKind.METHOD else {}
    body = dump(_spoken(http).error(fault))
    response = Response(body, fault.kind.status, headers, "application/json")
    await response(http.scope, receive, send)


async def _reply(body: object, http: HttpRequest, receive: Receive, send: Send) -> None:
    response = Response(dump(body), media_type="application/json")
    await response(http.scope, receive, send)


def _path_of(http: HttpRequest) -> str:
    """The path below the episode's prefix and /v1."""
    path: str = http.path_params.get("path", "")
    return path.strip("/").removeprefix("v1/")


def _spoken(http: HttpRequest) -> WireProtocol:
    """The protocol that a refusal is worded in."""
    path = _path_of(http)
    if path in _PROTOCOLS:
        return _PROTOCOLS[path]
    is_anthropic = "anthropic-version" in http.headers or "x-api-key" in http.headers
    return _ANTHROPIC if is_anthropic else _CHAT


def _asked(http: HttpRequest) -> str:
    return f"{http.method[:20]} {http.url.path[:200]}"


@contextlib.contextmanager
def _unforeseen_forms() -> Iterator[None]:
    """A form that nobody thought of: it is the request that does not fit."""
    try:
        yield
    except RecursionError as error:
        raise invalid("JSON that is nested less deeply", "more levels than can be read") from error
    except _ODD_FORM as error:
        kind = type(error).__name__
        raise invalid("a request in the protocol's form", kind, str(error)[:200]) from error


def _require_key(http: HttpRequest, session: Session) -> None:
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    given = [key.encode() for key in (bearer, http.headers.get("x-api-key", "")) if key]
    if not any(hmac.compare_digest(key, session.key.encode()) for key in given):
        raise RequestFault(
            FaultKind.AUTH,
            "expected this episode's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY', "
            f"got {'another one' if given else 'none'}; prefix and key belong together",
        )

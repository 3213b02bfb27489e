"""Everything under one episode's URL prefix: keys, bodies, protocols, probes.

Not here: sockets and the life of the server (server.py), prompts (session.py). A further protocol
is one more entry in `_PROTOCOLS`.
Invariant: every refusal has the shape of the protocol that was spoken.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.faults import FaultKind, RequestFault, invalid
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.protocol import WireProtocol
from clawgym_jax.proxy.session import Session
from clawgym_jax.proxy.streaming import Client, answer_stream, answer_whole

_PROTOCOLS: Mapping[str, WireProtocol] = {
    "messages": AnthropicMessages(),
    "messages/count_tokens": AnthropicMessages(),
    "chat/completions": OpenAIChat(),
}
MODEL = "policy"


class EpisodeApp:
    """An ASGI application."""

    def __init__(self, sessions: Mapping[str, Session], config: ProxyConfig) -> None:
        self._sessions = sessions
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        http = HttpRequest(scope, receive)
        params = scope["path_params"]
        path = params.get("path", "").strip("/").removeprefix("v1/")
        spoken = _protocol_of(path, http)
        try:
            session = self._session(params["episode"])
            if scope["method"] in ("GET", "HEAD"):
                response = _probe(path, session, http)
                await response(scope, receive, send)
                return
            await self._post(http, path, session, Client(receive, send), started_s)
        except RequestFault as fault:
            response = JSONResponse(spoken.error(fault), fault.kind.status)
            await response(scope, receive, send)
        except ClientDisconnect:
            return  # gone before the request was complete: nothing was sampled
        except Exception as error:  # a form nobody thought of: answered in the protocol's shape
            refusal = invalid("a request in the protocol's form", type(error).__name__, str(error))
            response = JSONResponse(spoken.error(refusal), refusal.kind.status)
            with contextlib.suppress(RuntimeError):  # the answer may have begun
                await response(scope, receive, send)

    async def _post(
        self, http: HttpRequest, path: str, session: Session, client: Client, started_s: float
    ) -> None:
        _require_key(http, session)
        protocol = _PROTOCOLS.get(path)
        if protocol is None or http.method != "POST":
            raise RequestFault(
                FaultKind.NOT_FOUND,
                f"expected POST to one of {[f'/v1/{name}' for name in _PROTOCOLS]}, "
                f"got {http.method} {http.url.path}",
            )
        body = _json_of(await _read(http, self._config.max_body_bytes))
        request = protocol.parse(body, dict(http.headers))
        if path.endswith("count_tokens"):
            response = JSONResponse({"input_tokens": await session.count_tokens(request)})
            await response(http.scope, http.receive, client.send)
            return
        flight = session.submit(await session.prepare(request))
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


def _require_key(http: HttpRequest, session: Session) -> None:
    given = http.headers.get("x-api-key") or ""
    authorization = http.headers.get("authorization", "")
    if authorization.lower().startswith("bearer "):
        given = authorization[7:].strip()
    if not hmac.compare_digest(given.encode(), session.key.encode()):
        raise RequestFault(
            FaultKind.AUTH,
            "expected this episode's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY', "
            f"got {'another one' if given else 'none'}; prefix and key belong together",
        )


async def _read(http: HttpRequest, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise RequestFault(
                FaultKind.TOO_LARGE,
                f"expected a body of at most {limit_bytes} bytes, got more; raise max_body_bytes",
            )
        chunks.append(chunk)
    return b"".join(chunks)


def _json_of(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw.decode("utf-8"))
        if not isinstance(body, dict):
            raise invalid("a JSON object as body", body)
        return dict(_without_lone_surrogates(body)) if b"\\ud" in raw.lower() else body
    except (ValueError, RecursionError) as error:
        raise invalid("a JSON object in UTF-8 as body", raw[:80], str(error)) from error


def _without_lone_surrogates(value: Any) -> Any:
    """Halves of surrogate pairs are no text: they become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_lone_surrogates(k): _without_lone_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    return value


def _protocol_of(path: str, http: HttpRequest) -> WireProtocol:
    """The protocol that a refusal is worded in."""
    if path in _PROTOCOLS:
        return _PROTOCOLS[path]
    anthropic = "anthropic-version" in http.headers or "x-api-key" in http.headers
    return _PROTOCOLS["messages" if anthropic else "chat/completions"]


def _probe(path: str, session: Session, http: HttpRequest) -> Response:
    """GET and HEAD: model lists, and whatever a harness looks at to see that we are there."""
    if path == "models":
        _require_key(http, session)
        model = _model_card(MODEL)
        return JSONResponse(
            {
                "object": "list",
                "data": [model],
                "has_more": False,
                "first_id": MODEL,
                "last_id": MODEL,
            }
        )
    if path.startswith("models/"):
        _require_key(http, session)
        return JSONResponse(_model_card(path.removeprefix("models/")))
    return JSONResponse({"ok": True})


def _model_card(name: str) -> dict[str, Any]:
    """Both protocols' fields: each client reads its own."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "run",
    }

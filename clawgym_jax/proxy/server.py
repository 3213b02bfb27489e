"""The HTTP server: one URL prefix and one key per episode.

    /e/<episode>/v1/messages, /v1/messages/count_tokens, /v1/chat/completions, /v1/models
    /health

Not here: wire forms, prompts, retries. A further protocol is one more entry in `_PROTOCOLS`.
Invariant: every refusal has the shape of the protocol that was spoken.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Endpoint
from clawgym_jax.core.log import RecordLog
from clawgym_jax.proxy.anthropic import AnthropicMessages
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
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


class ProxyServer:
    """Serves all episodes of a run from one event loop."""

    def __init__(
        self, codec: ChatCodec, log: RecordLog, run_id: str, config: ProxyConfig | None = None
    ) -> None:
        self.codec = codec
        self.config = config or ProxyConfig()
        self.port = 0
        self._log = log
        self._run_id = run_id
        self._sessions: dict[str, Session] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._socket_path: Path | None = None

    # ---- life ---------------------------------------------------------------------------------

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, socket_dir: Path | None = None
    ) -> None:
        """Listens on TCP, and on `socket_dir/proxy.sock` for sandboxes without a network."""
        sockets = self._listen(host, port, socket_dir)
        config = uvicorn.Config(
            Starlette(routes=self._routes()),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise ConfigError("the proxy's server ended before it started")
            await asyncio.sleep(0.002)

    def _listen(self, host: str, port: int, socket_dir: Path | None) -> list[socket.socket]:
        """All listeners, or none where one of them fails."""
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.create_server((host, port), backlog=1024))
            # asyncio leaves this out for sockets that it did not make; 40 ms an answer without.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets = [listener]
            if socket_dir is not None:
                path = Path(socket_dir) / "proxy.sock"
                sockets.append(opened.enter_context(_unix_listener(path)))
                self._socket_path = path
            self.port = sockets[0].getsockname()[1]
            opened.pop_all()
            return sockets

    async def stop(self) -> None:
        """Closes what is open and stops listening."""
        for episode_id in list(self._sessions):
            await self.close_episode(episode_id)
        if self._server is not None and self._serving is not None:
            self._server.end()
            await self._serving
            self._server = self._serving = None
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- episodes -----------------------------------------------------------------------------

    def open_episode(self, spec: EpisodeSpec) -> Endpoint:
        """Makes a prefix and a key. Call it on the server's event loop."""
        if spec.episode_id in self._sessions:
            raise ConfigError(f"episode {spec.episode_id!r} is open already; ids are used once")
        session = Session(spec, self.codec, self._log, self._run_id, self.config)
        self._sessions[spec.episode_id] = session
        return Endpoint(
            base_url=f"{self.origin}/e/{spec.episode_id}",
            key=session.key,
            model=MODEL,
            window_tok=spec.window_tok,
            max_tok=spec.max_tok,
        )

    def failure_event(self, episode_id: str) -> asyncio.Event:
        """Set when the episode cannot be used any more: stop its harness."""
        return self._sessions[episode_id].failed

    async def close_episode(self, episode_id: str) -> EpisodeTrace:
        """Settles the records, forgets the key and returns everything recorded."""
        session = self._sessions[episode_id]
        try:
            return await session.close()
        finally:
            self._sessions.pop(episode_id, None)

    # ---- requests -----------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        async def health(_: HttpRequest) -> Response:
            return JSONResponse({"ok": True, "episodes": len(self._sessions)})

        endpoint = _EpisodeApp(self._sessions, self.config)
        return [
            Route("/health", health, methods=["GET"]),
            Route("/e/{episode}", endpoint),
            Route("/e/{episode}/{path:path}", endpoint),
        ]


class _EpisodeApp:
    """Everything under one episode's prefix."""

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
            response = JSONResponse({"input_tokens": session.count_tokens(request)})
            await response(http.scope, http.receive, client.send)
            return
        flight = session.submit(session.prepare(request))
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


class _Server(uvicorn.Server):
    """uvicorn inside our event loop: no ticks, and signals are the program's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _unix_listener(path: Path) -> socket.socket:
    """A fresh socket in a private directory; who can enter the directory may connect."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if len(os.fsencode(path)) >= 108:
        raise ConfigError(f"socket path of {len(str(path))} bytes, expected under 108: {path}")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o666)  # a container's user is not ours; the directory guards it
    listener.listen(1024)
    return listener


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
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid("a JSON object as body", raw[:80], str(error)) from error
    if not isinstance(body, dict):
        raise invalid("a JSON object as body", body)
    return dict(_without_lone_surrogates(body)) if b"\\ud" in raw.lower() else body


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

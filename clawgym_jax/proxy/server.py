"""The HTTP server: one URL prefix and one key per episode.

    /e/<episode>/v1/messages, /v1/messages/count_tokens, /v1/chat/completions, /v1/responses,
                /v1/models
    /health

Not here: what is done with a request (episode_app.py).
Invariant: nothing of uvicorn reaches the program around it: no signal handlers, no logging.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Endpoint
from clawgym_jax.core.log import RecordLog
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.episode_app import EpisodeApp, refuse
from clawgym_jax.proxy.faults import FaultKind, RequestFault
from clawgym_jax.proxy.http_bounds import BoundedHttp
from clawgym_jax.proxy.probes import MODEL
from clawgym_jax.proxy.session import Session


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
        self._long_work = (asyncio.Lock(), asyncio.Lock())

    # ---- life ---------------------------------------------------------------------------------

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, socket_dir: Path | None = None
    ) -> None:
        """Listens on TCP, and on `socket_dir/proxy.sock` for sandboxes without a network."""
        sockets = self._listen(host, port, socket_dir)
        # What is there by now stays: the collector of cycles need not look at all of it again and
        # again while calls wait (30 ms and more each time, with JAX in the process).
        gc.collect()
        gc.freeze()
        config = uvicorn.Config(
            Router(routes=self._routes()),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            http=BoundedHttp,
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
        session = Session(spec, self.codec, self._log, self._run_id, self.config, self._long_work)
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

        endpoint = EpisodeApp(self._sessions, self.config)
        return [
            Route("/health", health, methods=["GET"]),
            Route("/e/{episode}", endpoint),
            Route("/e/{episode}/{path:path}", endpoint),
            Route("/{path:path}", _Nowhere()),
        ]


class _Nowhere:
    """What is asked for outside of every prefix."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        path = http.url.path[:200]
        fault = RequestFault(
            FaultKind.NOT_FOUND, f"expected /health or /e/EPISODE/v1/..., got {path}"
        )
        await refuse(http, fault, receive, send)


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

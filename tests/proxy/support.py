"""What the proxy's tests share: a codec, a scripted engine, a harness without a program."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from clawgym_jax.core.interfaces import Endpoint, Harness, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Completion, Finish, Role, SamplingParams, Stop
from clawgym_jax.harness.roles import role_of
from clawgym_jax.proxy import ChatCodec, EpisodeSpec, ProxyConfig, ProxyServer

TINY = Path(__file__).resolve().parents[2] / "clawgym_jax" / "data" / "tiny_base"
USER = {"role": "user", "content": "Do it."}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
LOOK_ANTHROPIC = {
    "name": "look",
    "description": "Look",
    "input_schema": LOOK["function"]["parameters"],  # type: ignore[index]
}


@functools.cache
def tiny_codec() -> ChatCodec:
    return ChatCodec.from_folder(TINY)


class AnyHarness:
    """Has no opinion about its calls."""

    name = "any"
    protocol = "any"
    image = ""
    mcp = False

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        raise NotImplementedError("these tests speak to the proxy themselves")

    def chain(self, view: RequestView) -> str:
        return view.headers.get("x-agent", "")

    def role(self, view: RequestView) -> Role:
        return role_of(view)


def completion(
    ids: Sequence[int], finish: Finish = Finish.STOP, stop_string: str | None = None
) -> Completion:
    array = np.asarray(ids, np.int32)
    logprobs = -np.arange(1, array.size + 1, dtype=np.float32) / 8
    return Completion(
        array, logprobs, logprobs, np.ones(array.size, np.uint32), finish, None, stop_string
    )


@dataclass
class Asked:
    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    stop: Stop


Say = str | Completion | Exception | Callable[[Asked], Completion]


@dataclass
class ScriptedEngine:
    """Says what the script says, one item a request; a gate holds answers back."""

    codec: ChatCodec
    script: list[Say]
    asked: list[Asked] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None  # set: answers may leave
    _aborts: dict[str, asyncio.Event] = field(default_factory=dict)

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        asked = Asked(request_id, prompt_ids, params, stop)
        self.asked.append(asked)
        said = self.script.pop(0) if self.script else "nothing more to say"
        abort = self._aborts.setdefault(request_id, asyncio.Event())
        if self.gate is not None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, abort)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if abort.is_set():
            return completion(self.codec.encode_rendered("cut")[:1].tolist(), Finish.ABORT)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Completion):
            return said
        if callable(said):
            return said(asked)
        ids = self.codec.encode_rendered(said + self.codec.end_of_turn)
        return completion(ids.tolist())

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        return completion(ids.tolist())

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._aborts.setdefault(request_id, asyncio.Event()).set()


@dataclass
class Stage:
    """A proxy with one open episode."""

    proxy: ProxyServer
    engine: ScriptedEngine
    endpoint: Endpoint
    log_path: Path
    http: httpx.AsyncClient

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.endpoint.key}"}

    async def chat(self, messages: list[Any], headers: Any = None, **more: Any) -> httpx.Response:
        body = {"model": "m", "messages": messages, **more}
        url = f"{self.endpoint.base_url}/v1/chat/completions"
        return await self.http.post(url, json=body, headers={**self.auth, **(headers or {})})

    async def messages(
        self, messages: list[Any], headers: Any = None, **more: Any
    ) -> httpx.Response:
        body = {"model": "m", "max_tokens": 99, "messages": messages, **more}
        url = f"{self.endpoint.base_url}/v1/messages"
        return await self.http.post(url, json=body, headers={**self.auth, **(headers or {})})

    async def responses(self, items: list[Any], headers: Any = None, **more: Any) -> httpx.Response:
        body = {"model": "m", "input": items, **more}
        url = f"{self.endpoint.base_url}/v1/responses"
        return await self.http.post(url, json=body, headers={**self.auth, **(headers or {})})


FAST = ProxyConfig(settle_interval_s=0.002, retry_grace_s=0.3, keepalive_s=0.05, engine_wait_s=2.0)


@contextlib.asynccontextmanager
async def stage(
    *script: Say,
    codec: ChatCodec | None = None,
    config: ProxyConfig = FAST,
    window_tok: int = 4096,
    max_tok: int = 64,
    gated: bool = False,
    sampling: SamplingParams | None = None,
    folder: str | None = None,
    harness: Harness | None = None,
) -> AsyncIterator[Stage]:
    """folder: keeps the log. harness: whose word on chains and roles counts; AnyHarness."""
    codec = codec or tiny_codec()
    engine = ScriptedEngine(codec, list(script), gate=asyncio.Event() if gated else None)
    with tempfile.TemporaryDirectory() as passing:
        path = Path(folder or passing) / "calls.log"
        with RecordLog(path) as log:
            proxy = ProxyServer(codec, log, "run", config)
            await proxy.start()
            spec = EpisodeSpec(
                "ep",
                harness or AnyHarness(),
                engine,
                sampling or SamplingParams(),
                window_tok,
                max_tok,
                7,
            )
            try:
                endpoint = proxy.open_episode(spec)
                async with httpx.AsyncClient(timeout=30) as http:
                    yield Stage(proxy, engine, endpoint, path, http)
            finally:
                await proxy.stop()


def call_text(name: str, arguments: dict[str, Any] | str) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'

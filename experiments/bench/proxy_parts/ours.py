"""Our proxy in a process of its own, over an engine that answers with the same call every time.

Commands come as JSON lines on standard input, each is answered by one JSON line:
{"open": N}, {"close": true}, {"hold_s": S}, {"measure": true}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import uvloop

from clawgym_jax.core.interfaces import Endpoint
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.proxy import ChatCodec, EpisodeSpec, ProxyServer

SAID = (
    "I look at the next file.\n"
    '<tool_call>\n{"name": "Tool3", "arguments": {"path": "src/a.py", "mode": "r"}}\n</tool_call>'
)
WINDOW_TOK = 1 << 20


class NullEngine:
    """A Sampler that costs nothing but, where asked, time."""

    def __init__(self, codec: ChatCodec) -> None:
        self.hold_s = 0.0
        ids = codec.encode_rendered(SAID + codec.end_of_turn)
        zeros = np.zeros(ids.size, np.float32)
        versions = np.ones(ids.size, np.uint32)
        self._said = Completion(ids, zeros, zeros, versions, Finish.STOP)

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        if self.hold_s:
            await asyncio.sleep(self.hold_s)
        return self._said

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        return self._said

    def cancel(self, request_id: str) -> None:
        """Nothing to free."""


class CountingCodec(ChatCodec):
    """Adds up what the tokenizer does."""

    encoded_chars = 0
    encode_s = 0.0

    def encode_text(self, text: str) -> np.ndarray:
        started_s = time.perf_counter()
        ids = super().encode_text(text)
        self.encode_s += time.perf_counter() - started_s
        self.encoded_chars += len(text)
        return ids


class Lag:
    """How late the event loop wakes up."""

    def __init__(self) -> None:
        self.seen_s: list[float] = []

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            self.seen_s.append(time.perf_counter() - before - 0.005)


class Bench:
    """The commands."""

    def __init__(self, proxy: ProxyServer, codec: CountingCodec, engine: NullEngine) -> None:
        self._proxy, self._codec, self._engine = proxy, codec, engine
        self._open: list[str] = []
        self._opened = 0
        self.lag = Lag()

    async def obey(self, command: dict[str, Any]) -> Any:
        if "open" in command:
            return [self._endpoint() for _ in range(command["open"])]
        if "hold_s" in command:
            self._engine.hold_s = command["hold_s"]
        if "close" in command:
            for name in self._open:
                await self._proxy.close_episode(name)
            self._open = []
        if "measure" in command:
            return self._measures()
        return {}

    def _endpoint(self) -> dict[str, Any]:
        self._opened += 1
        name = f"ep{self._opened}"
        self._open.append(name)
        spec = EpisodeSpec(
            name, ClaudeCode(), self._engine, SamplingParams(), WINDOW_TOK, 4096, self._opened
        )
        endpoint: Endpoint = self._proxy.open_episode(spec)
        return {"path": endpoint.base_url.removeprefix(self._proxy.origin), "key": endpoint.key}

    def _measures(self) -> dict[str, Any]:
        seen = sorted(self.lag.seen_s) or [0.0]
        self.lag.seen_s = []
        status = Path("/proc/self/statm").read_text().split()
        return {
            "rss_bytes": int(status[1]) * 4096,
            "lag_p50_s": seen[len(seen) // 2],
            "lag_p99_s": seen[int(len(seen) * 0.99)],
            "lag_max_s": seen[-1],
            "encoded_chars": self._codec.encoded_chars,
            "encode_s": self._codec.encode_s,
        }


async def main(tokenizer: Path) -> None:
    codec = CountingCodec.from_folder(tokenizer)
    assert isinstance(codec, CountingCodec)
    engine = NullEngine(codec)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with tempfile.TemporaryDirectory() as folder, RecordLog(Path(folder) / "calls.log") as log:
        proxy = ProxyServer(codec, log, "bench")
        await proxy.start()
        bench = Bench(proxy, codec, engine)
        watch = asyncio.create_task(bench.lag.watch())
        print(json.dumps({"port": proxy.port}), flush=True)
        while line := await lines.readline():
            print(json.dumps(await bench.obey(json.loads(line))), flush=True)
        watch.cancel()
        await proxy.stop()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))

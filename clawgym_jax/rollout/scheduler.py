"""Many rollouts at once, on a thread of their own beside the trainer.

`RolloutHost` owns an event loop with the proxy and the sandboxes; the trainer's thread hands it
instances and waits. Every finished episode is logged before anybody sees it.
Not here: one rollout (`episode`), groups (`group`).
Invariant: `run` returns the episodes in the order of its instances, each of them in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Sampler, SandboxFactory
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Episode, SamplingParams
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.server import ProxyServer
from clawgym_jax.rollout.episode import Instance, Limits, Site, run_episode

T = TypeVar("T")
CLEAN_UP_S = 15.0


@dataclass(frozen=True)
class RolloutConfig:
    """How episodes are run."""

    concurrency: int = 32  # episodes in flight
    limits: Limits = field(default_factory=Limits)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)


class RolloutHost:
    """Use as a context manager; all public methods are for the trainer's thread."""

    def __init__(
        self,
        run_id: str,
        codec: ChatCodec,
        calls: RecordLog,
        episodes: RecordLog,
        sandboxes: SandboxFactory,
        config: RolloutConfig,
    ) -> None:
        if config.concurrency < 1:
            raise ConfigError(f"rollout.concurrency: expected at least 1, got {config.concurrency}")
        self._config = config
        self._episodes = episodes
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._socket_dir = Path(tempfile.mkdtemp(prefix="cg-"))  # short: socket paths are limited
        self.site = Site(
            run_id,
            ProxyServer(codec, calls, run_id, config.proxy),
            self._socket_dir,
            sandboxes,
            config.limits,
            session=secrets.token_hex(3),
        )
        self._call(self.site.proxy.start(socket_dir=self._socket_dir))

    def run(
        self,
        instances: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        *,
        on_policy: bool = True,
        on_done: Callable[[Episode], None] = lambda _: None,
    ) -> list[Episode]:
        """Runs all instances; `on_done` is called on the rollout thread as episodes finish.

        Ctrl-C cancels what is in flight; episodes that finished before are in the log.
        """
        return self._call(self._run_all(instances, sampler, sampling, on_policy, on_done))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._call(self.site.proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def __enter__(self) -> RolloutHost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, job: Coroutine[Any, Any, T]) -> T:
        """Runs `job` on the loop; an interrupt cancels it and waits until it has cleaned up."""
        ended = threading.Event()

        async def tracked() -> T:
            try:
                return await job
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(timeout=CLEAN_UP_S)
            raise

    async def _run_all(
        self,
        instances: Sequence[Instance],
        sampler: Sampler,
        sampling: SamplingParams,
        on_policy: bool,
        on_done: Callable[[Episode], None],
    ) -> list[Episode]:
        gate = asyncio.Semaphore(self._config.concurrency)

        async def one(instance: Instance) -> Episode:
            async with gate:
                episode = await run_episode(instance, self.site, sampler, sampling, on_policy)
            self._episodes.append(episode.record)
            on_done(episode)
            return episode

        jobs = [asyncio.ensure_future(one(instance)) for instance in instances]
        try:
            return list(await asyncio.gather(*jobs))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

"""Sandboxes as Docker containers: no network, no privileges, limits on the whole sandbox.

One container per sandbox. Its main process (uid 65534) only keeps it alive or forwards
127.0.0.1:PORT to the proxy's mounted socket; programs are exec'd as another user, so that one
`kill -9 -1` as that user ends all of them and nothing else. The only file that imports the SDK,
which blocks: its calls run in threads of the factory's own pool.
Not here: images (`recipes.py`, `images.py`) and the engine (`engine.py`).
Invariant: every container carries its owner's label from its creation on, so that whatever
happens between two calls, `close`, a cancelled `create` or a later `sweep` removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils.socket import STDOUT, frames_iter

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, SandboxSpec
from clawgym_jax.sandbox import container, engine
from clawgym_jax.sandbox.child import KILLED, uncancelled
from clawgym_jax.sandbox.folders import Folder, Owner, RunFolder
from clawgym_jax.sandbox.local import OUTPUT_LIMIT_BYTES

T = TypeVar("T")

KILL_EVERY_S = 0.5
ENGINE_ERRORS = (DockerException, requests.RequestException)


def connect(address: str | None = None) -> Any:
    """A client of the engine at `address`, or of the one that `engine.find` finds."""
    address = address or engine.find()
    if address is None:
        raise SandboxError(
            "no Docker engine answers: start Docker, set DOCKER_HOST, or as root run "
            "`python -m clawgym_jax.sandbox.engine start`"
        )
    try:
        client = docker.DockerClient(base_url=address, timeout=120, max_pool_size=256)
        client.ping()
    except ENGINE_ERRORS as error:
        raise SandboxError(f"the Docker engine at {address} does not answer: {error}") from error
    return client


class DockerSandbox:
    """One container. Runs take turns: the end of one ends every process of its user."""

    def __init__(self, factory: DockerSandboxes, spec: SandboxSpec, folder: Folder) -> None:
        self.workspace = spec.mount
        self.home = container.HOME
        self.workspace_host = folder.work
        self.home_host = folder.home
        self.base_url = f"http://127.0.0.1:{container.PORT}" if spec.endpoint_socket else ""
        self.container: Any = None
        self._factory = factory
        self._folder = folder
        self._turn = asyncio.Lock()
        self._closing = asyncio.Event()
        self._close_lock = asyncio.Lock()
        self._removed = False

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str | None = None,
        stop: asyncio.Event | None = None,
    ) -> ExecResult:
        async with self._turn:
            if self._closing.is_set():
                raise SandboxError(f"the sandbox {self.container.name} is closed: make another")
            stops = [self._closing] if stop is None else [self._closing, stop]
            return await self._run(argv, env, timeout_s, cwd or self.workspace, stops)

    async def _run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str,
        stops: Sequence[asyncio.Event],
    ) -> ExecResult:
        started_s = time.monotonic()
        execution = _Execution(
            self._factory.client.api,
            self.container.id,
            container.wrapped(argv, env, timeout_s),
            env,
            cwd,
            self._factory.uid,
            self._factory.output_limit_bytes,
        )
        await self._factory.call(self._hand_over)
        running = asyncio.ensure_future(self._factory.call(execution.run))
        waits = [asyncio.ensure_future(event.wait()) for event in stops]
        try:
            await asyncio.wait(
                [running, *waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
            ended = running.done()
            await uncancelled(self._finish(running, execution))
        code = running.result()
        return ExecResult(
            returncode=code if ended else KILLED,
            stdout=execution.stdout(),
            stderr=execution.stderr(),
            timed_out=not ended and not any(stop.is_set() for stop in stops),
            seconds=time.monotonic() - started_s,
        )

    async def _finish(self, running: asyncio.Future[int], execution: _Execution) -> None:
        """Leaves no process; a program may be killed before it has started, so keep killing."""
        if running.done() and execution.code == KILLED:  # perhaps the wrapper itself was killed
            await self._factory.call(self._kill)
        while not running.done():
            await self._factory.call(self._kill)
            await asyncio.wait([running], timeout=KILL_EVERY_S)

    def _hand_over(self) -> None:
        """Gives what was put into the folders from outside to the user inside."""
        if os.getuid() != 0:
            return
        uid = self._factory.uid
        for root in (self.workspace_host, self.home_host):
            os.chown(root, uid, uid)
            for folder, folders, files in os.walk(root):
                for name in (*folders, *files):
                    os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)

    def _kill(self) -> None:
        """Kills every process of the programs' user."""
        api = self._factory.client.api
        user = f"{self._factory.uid}:{self._factory.uid}"
        kill = ["/bin/sh", "-c", "kill -9 -1"]
        with contextlib.suppress(APIError, NotFound):
            found = api.exec_create(self.container.id, kill, user=user)
            api.exec_start(found["Id"])

    async def close(self) -> None:
        self._closing.set()
        async with self._close_lock:
            async with self._turn:
                pass  # the running program, if any, has been killed
            if not self._removed:
                if self.container is not None:
                    await self._factory.call(lambda: _remove(self.container))
                await self._factory.folders.remove(self._folder)
                self._removed = True


class DockerSandboxes:
    """Makes containers on one engine. `images` must have been built (`launch/images.py`)."""

    kind = "docker"

    def __init__(
        self,
        base: Path | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        address: str | None = None,
        max_threads: int = 256,
    ) -> None:
        self.client = connect(address)
        self.folders = RunFolder(base)
        self.output_limit_bytes = output_limit_bytes
        self.uid = os.getuid() or 1000
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="docker")
        weakref.finalize(self, self.client.close)

    async def call(self, work: Callable[[], T]) -> T:
        """Runs a blocking SDK call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        if spec.network_port is not None and spec.endpoint_socket is None:
            raise SandboxError(
                "a container has no network: give endpoint_socket (the folder of the proxy's "
                f"unix socket), got only network_port={spec.network_port}"
            )
        folder = self.folders.create()
        sandbox = DockerSandbox(self, spec, folder)
        try:
            work = self.call(lambda: self._create(sandbox, spec, folder))
            await uncancelled(work)
        except BaseException:
            await uncancelled(sandbox.close())
            raise
        return sandbox

    def sweep(self) -> int:
        """Removes containers and folders of dead runs of this machine."""
        removed = 0
        filters = {"label": f"{container.LABEL}.host={container.host_label()}"}
        for found in self.client.containers.list(all=True, filters=filters):
            try:
                owner = Owner.parse(found.labels.get(f"{container.LABEL}.owner", ""))
            except ValueError:
                continue
            if not owner.alive():
                _remove(found)
                removed += 1
        self.folders.sweep()
        return removed

    def _create(self, sandbox: DockerSandbox, spec: SandboxSpec, folder: Folder) -> None:
        try:
            sandbox.container = self.client.containers.create(**container.options(spec, folder))
            sandbox.container.start()
        except ImageNotFound as error:
            raise SandboxError(
                f"image {spec.image or 'base'!r} is not built: run "
                f"`python launch/images.py --images={spec.image or 'base'}`"
            ) from error
        except ENGINE_ERRORS as error:
            raise SandboxError(f"cannot start a container of {spec.image!r}: {error}") from error


class _Execution:
    """One exec: blocks in a thread, keeps the last bytes of both outputs."""

    def __init__(
        self,
        api: Any,
        container_id: str,
        argv: list[str],
        env: Mapping[str, str],
        cwd: str,
        uid: int,
        limit: int,
    ) -> None:
        self.code: int | None = None
        self._api = api
        self._request = {
            "container": container_id,
            "cmd": argv,
            "environment": dict(env),
            "workdir": cwd,
            "user": f"{uid}:{uid}",
        }
        self._limit = limit
        self._out = bytearray()
        self._err = bytearray()

    def run(self) -> int:
        try:
            exec_id = self._api.exec_create(**self._request)["Id"]
            stream = self._api.exec_start(exec_id, socket=True)
            with contextlib.closing(stream._response):  # which the SDK leaves open
                for which, chunk in frames_iter(stream, tty=False):
                    self._keep(self._out if which == STDOUT else self._err, chunk)
            self.code = int(self._api.exec_inspect(exec_id)["ExitCode"])
        except (*ENGINE_ERRORS, OSError, TypeError) as error:
            raise SandboxError(f"exec in a container failed: {error}") from error
        return self.code

    def stdout(self) -> bytes:
        return bytes(self._out[-self._limit :])

    def stderr(self) -> bytes:
        return bytes(self._err[-self._limit :])

    def _keep(self, kept: bytearray, chunk: bytes) -> None:
        kept += chunk
        if len(kept) > 2 * self._limit:
            del kept[: -self._limit]


def _remove(found: Any) -> None:
    """Removes a container with its anonymous volumes; being gone already is fine."""
    try:
        found.remove(force=True, v=True)
    except NotFound:
        return
    except ENGINE_ERRORS as error:
        if "already in progress" in str(error):
            return
        raise SandboxError(f"cannot remove container {found.name}: {error}") from error

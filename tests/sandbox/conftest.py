"""Factories of every kind, a stand-in for the proxy, and a look at this machine's processes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import Sandbox, SandboxFactory, SandboxSpec
from tests.conftest import require

KINDS = [
    pytest.param("process"),
    pytest.param("bubblewrap"),
    pytest.param("docker", marks=pytest.mark.docker),
]
ISOLATED = KINDS[1:]
ENV = {"PATH": "/usr/bin:/bin"}

MakeFactory = Callable[..., SandboxFactory]


@pytest.fixture(scope="session")
def docker_images() -> Callable[[str], str]:
    """Names an image once it is there; the tiny one is built on the spot."""
    from clawgym_jax.sandbox import docker, images, recipes

    def image(name: str) -> str:
        try:
            client = docker.connect()
        except SandboxError as error:
            require(False, str(error))
        with contextlib.closing(client):
            built = bool(client.images.list(name=recipes.tag(name)))
        if not built and name != "tiny":
            require(False, f"image {name} is not built: python launch/images.py --images={name}")
        if not built:
            try:
                images.ensure([name])
            except SandboxError as error:
                require(False, str(error))
        return name

    return image


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> MakeFactory:
    """Makes a factory of a kind, in a folder of its own."""

    def factory(kind: str, **options: int) -> SandboxFactory:
        base = tmp_path / "base"
        if kind == "process":
            from clawgym_jax.sandbox.process import ProcessSandboxes

            return ProcessSandboxes(base, **options)
        if kind == "bubblewrap":
            from clawgym_jax.sandbox import bubblewrap

            require(not bubblewrap.why_not(), bubblewrap.why_not())
            return bubblewrap.BubblewrapSandboxes(base, **options)
        from clawgym_jax.sandbox.docker import DockerSandboxes

        request.getfixturevalue("docker_images")("tiny")
        found = DockerSandboxes(base, **options)
        request.addfinalizer(found.client.close)
        return found

    return factory


def spec(kind: str, **options: object) -> SandboxSpec:
    image = "tiny" if kind == "docker" else ""
    return SandboxSpec(**{"run_id": "tests", "episode_id": "e1", "image": image, **options})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def sandbox_of(
    factory: SandboxFactory, kind: str, **options: object
) -> AsyncIterator[Sandbox]:
    sandbox = await factory.create(spec(kind, **options))
    try:
        yield sandbox
    finally:
        await sandbox.close()


def marker() -> str:
    """Seconds to sleep that no other process on this machine sleeps."""
    return str(random.SystemRandom().randint(10**8, 10**9))


def processes_with(text: str) -> list[str]:
    """Command lines of live processes on this machine that hold `text`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if text in line:
                    found.append(line)
    return found


@dataclass
class Origin:
    """A server that answers every request with what it got, on loopback TCP and a unix socket."""

    folder: Path
    port: int

    def reach(self, kind: str) -> dict[str, object]:
        """The part of a spec that lets a kind's programs reach this server."""
        if kind == "process":
            return {"network_port": self.port}
        return {"endpoint_socket": self.folder}


@contextlib.asynccontextmanager
async def origin() -> AsyncIterator[Origin]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + line)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    with tempfile.TemporaryDirectory(prefix="cgj") as folder:
        unix = await asyncio.start_unix_server(answer, f"{folder}/proxy.sock")
        tcp = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with unix, tcp:
            yield Origin(Path(folder), tcp.sockets[0].getsockname()[1])

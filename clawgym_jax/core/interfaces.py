"""The seams of the circle, on one page. Only `assemble` knows which class stands behind which.

Not here: any implementation. Each Protocol has a conformance test that every implementation passes.
Invariant: nothing here imports jax; `params` of a WeightSink is opaque to this layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from clawgym_jax.core.types import Completion, Grade, Role, SamplingParams, Stop


@runtime_checkable
class Sampler(Protocol):
    """Turns prompt ids into sampled ids. The proxy knows nothing else of a model."""

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        """Raises Overlong, NoWeights, EngineRestarted, Overloaded; abort when cancelled."""
        ...

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        """Teacher-forced: the log-probs the current weights give `ids` after `prompt_ids`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Frees the request's slot soon; its `sample` returns what it has with finish=abort."""
        ...


class WeightSink(Protocol):
    """Where the trainer publishes weights."""

    def publish(self, params: Any, version: int) -> None:
        """Returns once requests that arrive later are served by `version`. Versions rise."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one episode's harness finds its model. Prefix and key belong together."""

    base_url: str  # http://127.0.0.1:PORT/e/<episode>, without /v1
    key: str
    model: str = "policy"
    window_tok: int = 32768  # the context window the harness may be told
    max_tok: int = 4096  # most tokens a call may sample


@dataclass(frozen=True, slots=True)
class McpServer:
    """A task's extra tools: a Model Context Protocol server that speaks over its standard streams.

    It is started by the harness, inside the sandbox, with the working folder and rights of every
    other program there.
    """

    name: str  # letters, digits and "_": harnesses make tool names out of it
    argv: Sequence[str]  # {home} and {workspace} in it and in env become the paths inside
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # path relative to HOME -> content


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start a harness program in a sandbox. Everything is explicit; nothing is inherited."""

    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)  # path relative to HOME -> content


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a harness adapter may look at to tell a call's role: wire data, protocol-neutral."""

    headers: Mapping[str, str]  # lower-case names
    system: str  # all system / developer text, joined
    first_user: str
    last_user: str
    tools: tuple[str, ...]  # tool names
    model: str = ""  # as asked for


class Harness(Protocol):
    """An opaque agent program: how to start it and how to read what it is calling for."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> str:
        """Which of the proxy's protocols it speaks."""
        ...

    @property
    def image(self) -> str:
        """The sandbox image it needs; "" = any."""
        ...

    @property
    def mcp(self) -> bool:
        """Whether it can be given MCP servers."""
        ...

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        """`workspace` and `home` are paths as seen inside the sandbox."""
        ...

    def chain(self, view: RequestView) -> str:
        """Which conversation a call belongs to ("main" unless the harness says otherwise)."""
        ...

    def role(self, view: RequestView) -> Role:
        """What a call is for."""
        ...


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a program in a sandbox did. `timed_out` implies it was killed with its children."""

    returncode: int
    stdout: bytes  # last `output_limit_bytes` of it
    stderr: bytes
    timed_out: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must offer. Paths inside are constant, so that prompts agree."""

    run_id: str
    episode_id: str
    image: str = ""  # ignored by process and bubblewrap
    endpoint_socket: Path | None = None  # private directory with the proxy's unix socket, if any
    network_port: int | None = None  # loopback TCP port of the proxy the program may reach
    memory_bytes: int = 2 << 30
    pids: int = 256
    cpus: float = 2.0
    mount: str = "/workspace"  # where the task wants its workspace to appear


class Sandbox(Protocol):
    """One temporary place with a HOME and a workspace. Nothing in it outlives `close`."""

    workspace: str  # as seen inside
    home: str  # as seen inside
    workspace_host: Path  # the same folder on the host, for filling and grading
    home_host: Path
    base_url: str  # how programs inside reach the proxy's origin: http://127.0.0.1:PORT

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        cwd: str | None = None,
        stop: asyncio.Event | None = None,
    ) -> ExecResult:
        """Runs to the end, the timeout or `stop`; then no process of it is left."""
        ...

    async def close(self) -> None:
        """Kills and removes everything. May be called twice."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one kind."""

    kind: str  # "process" | "bubblewrap" | "docker"

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    def sweep(self) -> int:
        """Removes what dead runs left behind; returns how many things were removed."""
        ...


class Task(Protocol):
    """One problem: an instruction, an initial workspace and a grader."""

    @property
    def task_id(self) -> str: ...

    @property
    def instruction(self) -> str: ...

    @property
    def mount(self) -> str:
        """Where the workspace should appear inside the sandbox."""
        ...

    @property
    def servers(self) -> Sequence[McpServer]:
        """Tools that the task brings along, started inside the sandbox."""
        ...

    def fill(self, workspace_host: Path) -> None:
        """Writes the initial files. The grader's files are not among them."""
        ...

    async def grade(self, workspace_host: Path, sandboxes: SandboxFactory) -> Grade:
        """Grades the final workspace in a fresh sandbox. Never raises for a bad workspace."""
        ...

"""Leads a real harness program through a scripted play, in its image, and checks the books after.

A script has one part per conversation: the main agent, each sub-agent, a summary. Which part a
request belongs to is read off its prompt, so agents that run at once each get their own lines. The
lines are encoded with Qwen3's own tokenizer; the program sees nothing but the proxy.
Not here: what a program should have done (the tests). Nothing that a program sends is stored.
Invariant: a request for which no line is written fails the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import ExecResult, Harness, McpServer, SandboxSpec
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import CallRecord, Completion, Delivery, Role, SamplingParams, Stop
from clawgym_jax.proxy import ChatCodec, EpisodeSpec, EpisodeTrace, ProxyConfig, ProxyServer
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from tests.conftest import require
from tests.proxy.qwen3 import qwen3_codec
from tests.proxy.support import call_text, completion

EPISODE = "play"
WINDOW_TOK = 200_000
PATIENT = ProxyConfig(settle_interval_s=0.05, retry_grace_s=5.0, keepalive_s=1.0, engine_wait_s=5.0)
ALL_ROLES = FilterConfig(auxiliary_calls=False)

Words = str | Callable[[str], str]  # what the model says, or how it says it to a prompt


@dataclass(frozen=True)
class Held:
    """Words that wait until all other parts have said all of theirs."""

    words: Words


Line = Words | Held


@dataclass
class Part:
    """The lines of one conversation. `cue` is a text in its prompts, or in their last message."""

    cue: str
    lines: list[Line]
    last_message: bool = False  # the cue must be in what the prompt ends with

    def fits(self, prompt: str) -> bool:
        shown = prompt.rpartition("<|im_start|>user")[2] if self.last_message else prompt
        return self.cue in shown


@dataclass
class Stagehand:
    """A Sampler that says the next line of the first part whose cue is in the prompt."""

    parts: Sequence[Part]
    codec: ChatCodec = field(default_factory=qwen3_codec)
    said: dict[str, np.ndarray] = field(default_factory=dict)  # call id -> sampled ids
    prompts: list[str] = field(default_factory=list)  # decoded, in the order of the requests
    _taken: asyncio.Condition = field(default_factory=asyncio.Condition)  # a line has been

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        prompt = self.codec.decode(prompt_ids)
        self.prompts.append(prompt)
        part = next((part for part in self.parts if part.fits(prompt)), None)
        if part is None or not part.lines:
            whose = "no part" if part is None else f"the part {part.cue!r}"
            raise AssertionError(f"{whose} has no line left for a prompt ending {prompt[-1500:]!r}")
        text = await self._words(part, prompt)
        ids = self.codec.encode_rendered(text + self.codec.end_of_turn)
        assert request_id not in self.said
        self.said[request_id] = ids
        return completion(ids.tolist())

    async def _words(self, part: Part, prompt: str) -> str:
        others = [other for other in self.parts if other is not part]
        async with self._taken:
            line = part.lines.pop(0)
            self._taken.notify_all()
            if isinstance(line, Held):
                await self._taken.wait_for(lambda: not any(other.lines for other in others))
                line = line.words
        return line if isinstance(line, str) else line(prompt)

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        raise NotImplementedError("a play is not scored")

    def cancel(self, request_id: str) -> None:
        """A line is said at once: there is nothing to cancel."""

    @property
    def unsaid(self) -> list[Line]:
        return [line for part in self.parts for line in part.lines]


@dataclass(frozen=True)
class Played:
    """What is left of an episode."""

    result: ExecResult
    trace: EpisodeTrace
    logged: tuple[CallRecord, ...]  # read back from the call log
    files: Mapping[str, str]  # of the workspace, afterwards
    stagehand: Stagehand

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        return self.trace.calls

    def chain(self, name: str = "main") -> list[CallRecord]:
        return [call for call in self.calls if call.chain == name]

    def select(self, config: FilterConfig) -> Selection:
        return select_calls(self.calls, config)

    def explain(self) -> str:
        """For people, when an assertion fails."""
        rows = [
            f"{c.call_id} {c.chain} {c.role} {c.prompt_tok}+{c.completion_tok} "
            f"breaks={c.breaks} continues={c.continues} {c.delivery}"
            for c in self.calls
        ]
        out = (self.result.stdout + self.result.stderr).decode(errors="replace")
        return "\n".join([*rows, self.trace.failure, out[-3000:]])


def require_image(name: str) -> None:
    """Skips (in CI: fails) where the image of a harness is not built."""
    from clawgym_jax.sandbox import docker, recipes

    try:
        client = docker.connect()
    except SandboxError as error:
        require(False, str(error))
    with contextlib.closing(client):
        built = bool(client.images.list(name=recipes.tag(name)))
    require(built, f"image {name} is not built: python launch/images.py --images={name}")


@contextlib.asynccontextmanager
async def proxy_on_socket(folder: Path, log_path: Path) -> AsyncIterator[ProxyServer]:
    with RecordLog(log_path) as log:
        proxy = ProxyServer(qwen3_codec(), log, "run", PATIENT)
        await proxy.start(socket_dir=folder)
        try:
            yield proxy
        finally:
            await proxy.stop()


def perform(harness: Harness, *parts: Part, **how: Any) -> Played:
    """`play` to its end; see there for `how`."""
    return asyncio.run(play(harness, parts, **how))


async def play(
    harness: Harness,
    parts: Sequence[Part],
    instruction: str,
    base: Path,
    inputs: Mapping[str, str] | None = None,
    window_tok: int = WINDOW_TOK,
    max_tok: int = 4096,
    servers: Sequence[McpServer] = (),
    timeout_s: float = 200.0,
    url: str = "",  # in place of the proxy's
) -> Played:
    """One episode in a container of the harness's image, without a network."""
    from clawgym_jax.sandbox.docker import DockerSandboxes

    require_image(harness.image)
    stagehand = Stagehand(parts)
    log_path = base / "calls.log"
    with tempfile.TemporaryDirectory(prefix="cgj") as short:  # a socket's path must be short
        async with proxy_on_socket(Path(short) / "s", log_path) as proxy:
            factory = DockerSandboxes(base)
            spec = SandboxSpec(
                "tests", EPISODE, image=harness.image, endpoint_socket=Path(short) / "s"
            )
            sandbox = await factory.create(spec)
            try:
                _write(sandbox.workspace_host, inputs or {})
                endpoint = proxy.open_episode(
                    EpisodeSpec(
                        EPISODE, harness, stagehand, SamplingParams(), window_tok, max_tok, 7
                    )
                )
                inside = url or endpoint.base_url.replace(proxy.origin, sandbox.base_url)
                plan = harness.launch(
                    replace(endpoint, base_url=inside),
                    instruction,
                    sandbox.workspace,
                    sandbox.home,
                    servers,
                )
                _write(sandbox.home_host, plan.files)
                result = await sandbox.run(plan.argv, plan.env, timeout_s)
                trace = await proxy.close_episode(EPISODE)
                files = _read(sandbox.workspace_host)
            finally:
                await sandbox.close()
                factory.client.close()
    return Played(result, trace, tuple(read_calls(log_path)), files, stagehand)


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _read(folder: Path) -> dict[str, str]:
    """Every text of a few kilobytes below a folder."""
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 100_000
    }


# ---- the books ------------------------------------------------------------------------------


def assert_sampled_once(played: Played, all_said: bool = True) -> None:
    """What the engine said is in the log, call by call, and nothing else; all of it delivered.

    all_said: and no line of the script is left.
    """
    why = played.explain()
    assert not played.trace.failure, why
    said = played.stagehand.said
    assert sorted(call.call_id for call in played.logged) == sorted(said), why
    for call in played.logged:
        assert call.completion.ids.tolist() == said[call.call_id].tolist(), why
    assert {call.call_id for call in played.calls} == set(said), why
    assert all(call.delivery is Delivery.DELIVERED for call in played.calls), why
    assert sum(c.completion_tok for c in played.logged) == sum(ids.size for ids in said.values())
    assert not (all_said and played.stagehand.unsaid), why


def assert_no_turn_lost(played: Played) -> None:
    """No filter takes a turn: each is extended, continued or the last of its segment."""
    why = played.explain()
    trained = played.select(FilterConfig())
    main = [i for i, call in enumerate(played.calls) if call.role is Role.MAIN]
    assert list(trained.kept) == main, why
    dropped = {played.calls[i].role for i in played.select(ALL_ROLES).dropped}
    assert dropped <= {Role.COMPACTION}, why  # a summary is context later, and its call a leaf


def assert_appends(calls: Sequence[CallRecord], why: str = "") -> None:
    """Each prompt after the first starts with the prompt and the sampled ids of the call before."""
    for before, after in itertools.pairwise(calls):
        assert extends(after.prompt_ids, before), f"{before.call_id} -> {after.call_id}\n{why}"
        assert not after.breaks, (after.call_id, after.breaks, why)


def roles_of(played: Played) -> list[Role]:
    return [call.role for call in played.calls]


def shared_tok(before: CallRecord, after: CallRecord) -> int:
    """Tokens that the two prompts have in common from the start."""
    size = min(before.prompt_tok, after.prompt_tok)
    differ = np.nonzero(before.prompt_ids[:size] != after.prompt_ids[:size])[0]
    return int(differ[0]) if differ.size else size


# ---- lines ----------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen3 writes it; `call_text` with a text makes a malformed one."""
    return call_text(name, arguments)


def at_once(*calls: str) -> str:
    """Several tool calls in one turn."""
    return "\n".join(calls)

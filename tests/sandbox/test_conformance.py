"""What every kind of sandbox must do, checked on the real thing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import SandboxFactory
from tests.sandbox.conftest import (
    ENV,
    KINDS,
    MakeFactory,
    marker,
    origin,
    processes_with,
    sandbox_of,
    spec,
)

# A child that detaches itself in every way there is, and a parent that stays.
DAEMONS = "(setsid sh -c 'sleep {0} & exec sleep {0}' >/dev/null 2>&1 </dev/null &) ; {1}"

pytestmark = pytest.mark.parametrize("kind", KINDS)


def left_in(base: Path) -> list[Path]:
    return sorted(base.rglob("*")) if base.exists() else []


def containers_of(factory: SandboxFactory) -> int:
    client = getattr(factory, "client", None)
    if client is None:
        return 0
    mine = {"label": f"clawgym.episode={EPISODE}"}
    return len(client.containers.list(all=True, filters=mine))


EPISODE = f"episode-{marker()}"


def test_runs_a_program_in_the_workspace(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            (sandbox.workspace_host / "in.txt").write_text("given\n")
            script = "cat in.txt; pwd; echo warned >&2; echo made > out.txt; exit 7"
            done = await sandbox.run(["sh", "-c", script], ENV, 20)
            assert done.stdout.decode() == f"given\n{sandbox.workspace}\n"
            assert done.stderr == b"warned\n"
            assert (done.returncode, done.timed_out) == (7, False)
            assert 0 < done.seconds < 20
            assert (sandbox.workspace_host / "out.txt").read_text() == "made\n"

    asyncio.run(main())


def test_runs_on_uvloop(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            many = [sandbox.run(["echo", str(i)], ENV, 20) for i in range(5)]
            done = await asyncio.gather(*many)
            assert [d.stdout for d in done] == [b"%d\n" % i for i in range(5)]

    uvloop.run(main())


def test_home_and_workspace_are_separate_and_per_sandbox(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        factory = make(kind)
        async with sandbox_of(factory, kind) as one, sandbox_of(factory, kind) as two:
            env = ENV | {"HOME": one.home}
            script = 'echo home > "$HOME/h"; echo work > w; cd; pwd'
            done = await one.run(["sh", "-c", script], env, 20)
            assert done.stdout.decode() == f"{one.home}\n"
            assert (one.home_host / "h").read_text() == "home\n"
            assert (one.workspace_host / "w").read_text() == "work\n"
            seen = await two.run(["sh", "-c", "ls -A . ~"], ENV | {"HOME": two.home}, 20)
            assert b"\nh\n" not in seen.stdout and b"w\n" not in seen.stdout

    asyncio.run(main())


def test_cwd_is_what_was_asked(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            done = await sandbox.run(["pwd"], ENV, 20, cwd=sandbox.home)
            assert done.stdout.decode().strip() == sandbox.home

    asyncio.run(main())


@pytest.mark.parametrize(
    "env",
    [ENV, ENV | {"LANG": "C", "PWD": "/made/up", "LC_CTYPE": "C", "HOME": "/h", "A": "b c=d\ne"}],
)
def test_environment_is_exactly_what_was_given(
    kind: str, make: MakeFactory, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "do not leak")

    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            done = await sandbox.run(["/usr/bin/env", "-0"], env, 20)
            if done.returncode != 0:  # busybox knows no -0
                done = await sandbox.run(["/usr/bin/env"], env, 20)
            text = done.stdout.decode().replace("\0", "\n").strip()
            assert sorted(text.split("\n")) == sorted(
                line for k, v in env.items() for line in f"{k}={v}".split("\n")
            )

    asyncio.run(main())


def test_standard_input_is_empty(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            done = await sandbox.run(["cat"], ENV, 20)
            assert (done.returncode, done.stdout) == (0, b"")

    asyncio.run(main())


def test_exit_codes_of_signals_and_of_missing_programs(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            killed = await sandbox.run(["sh", "-c", "kill -9 $$"], ENV, 20)
            assert (killed.returncode, killed.timed_out) == (137, False)
            absent = await sandbox.run(["no-such-program"], ENV, 20)
            assert absent.returncode == 127 and b"no-such-program" in absent.stderr
            again = await sandbox.run(["echo", "fine"], ENV, 20)
            assert again.stdout == b"fine\n"

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["sleep {0}", "exit 0"])
def test_no_process_outlives_a_run(kind: str, make: MakeFactory, ending: str) -> None:
    """A10: an exec under a timeout, and one that ends but leaves daemons behind."""
    seconds = marker()
    script = DAEMONS.format(seconds, f"sleep 0.3; {ending.format(seconds)}")

    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            started_s = time.monotonic()
            done = await sandbox.run(["sh", "-c", script], ENV, 1.0)
            assert time.monotonic() - started_s < 60  # not the hours that its children sleep
            assert done.timed_out == ending.startswith("sleep")
            assert done.returncode == (137 if done.timed_out else 0)
            assert processes_with(seconds) == []

    asyncio.run(main())


def test_a_program_that_ignores_signals_is_killed(kind: str, make: MakeFactory) -> None:
    seconds = marker()
    script = f"trap '' TERM INT HUP; while :; do sleep {seconds}; done"

    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            done = await sandbox.run(["sh", "-c", script], ENV, 0.5)
            assert done.timed_out and processes_with(seconds) == []

    asyncio.run(main())


def test_stop_ends_a_run_that_did_not_time_out(kind: str, make: MakeFactory) -> None:
    seconds = marker()

    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(0.5, stop.set)
            script = f"echo begun; sleep {seconds}"
            done = await sandbox.run(["sh", "-c", script], ENV, 60, stop=stop)
            assert (done.stdout, done.timed_out, done.returncode) == (b"begun\n", False, 137)
            assert done.seconds < 10 and processes_with(seconds) == []

    asyncio.run(main())


def test_a_cancelled_run_leaves_nothing(kind: str, make: MakeFactory) -> None:
    seconds = marker()

    async def main() -> None:
        async with sandbox_of(make(kind), kind) as sandbox:
            run = asyncio.create_task(sandbox.run(["sleep", seconds], ENV, 60))
            await asyncio.sleep(0.4)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert processes_with(seconds) == []

    asyncio.run(main())


def test_output_keeps_its_end(kind: str, make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make(kind, output_limit_bytes=1000), kind) as sandbox:
            script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; echo last"
            done = await sandbox.run(["sh", "-c", script], ENV, 30)
            assert len(done.stdout) == 1000
            assert done.stdout.endswith(b"line 19999\nlast\n")

    asyncio.run(main())


def test_close_ends_runs_removes_all_and_may_be_repeated(
    kind: str, make: MakeFactory, tmp_path: Path
) -> None:
    seconds = marker()

    async def main() -> None:
        factory = make(kind)
        sandbox = await factory.create(spec(kind, episode_id=EPISODE))
        run = asyncio.create_task(sandbox.run(["sleep", seconds], ENV, 60))
        await asyncio.sleep(0.3)
        await asyncio.gather(sandbox.close(), sandbox.close())
        assert (await run).returncode == 137
        await sandbox.close()
        assert processes_with(seconds) == []
        assert left_in(tmp_path / "base") == [] and containers_of(factory) == 0
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.run(["true"], ENV, 5)

    asyncio.run(main())


def test_close_removes_what_a_hostile_program_made(
    kind: str, make: MakeFactory, tmp_path: Path
) -> None:
    script = """
        mkdir -p locked/inner; touch locked/inner/f; chmod 000 locked/inner locked
        ln -s /usr/bin outside
        deep=d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d/d
        i=0; while [ $i -lt 30 ]; do mkdir -p $deep && cd $deep || exit 1; i=$((i+1)); done
    """
    before = len(list(Path("/usr/bin").iterdir()))

    async def main() -> None:
        sandbox = await make(kind).create(spec(kind))
        done = await sandbox.run(["sh", "-c", script], ENV, 60)
        assert done.returncode == 0, done.stderr
        await sandbox.close()

    asyncio.run(main())
    assert left_in(tmp_path / "base") == []
    assert len(list(Path("/usr/bin").iterdir())) == before


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.15])
def test_a_cancelled_create_leaves_nothing(
    kind: str, make: MakeFactory, tmp_path: Path, after_s: float
) -> None:
    """A10: cancel between create and start."""

    async def main() -> None:
        factory = make(kind)
        creation = asyncio.create_task(factory.create(spec(kind, episode_id=EPISODE)))
        await asyncio.sleep(after_s)
        creation.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await creation).close()
        assert left_in(tmp_path / "base") == [] and containers_of(factory) == 0

    asyncio.run(main())


KILLED_RUN = """
import asyncio, json, os, sys
from pathlib import Path
from clawgym_jax.core.interfaces import SandboxSpec
from clawgym_jax.sandbox.select import make_sandboxes

async def main():
    factory = make_sandboxes(sys.argv[1], base=Path(sys.argv[2]))
    spec = SandboxSpec("tests", sys.argv[3], image=sys.argv[4])
    sandbox = await factory.create(spec)
    run = asyncio.create_task(sandbox.run(["sleep", sys.argv[5]], {"PATH": "/usr/bin:/bin"}, 600))
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await run

asyncio.run(main())
"""


def test_sweep_removes_dead_runs_and_leaves_live_ones(
    kind: str, make: MakeFactory, tmp_path: Path
) -> None:
    seconds = marker()
    base = tmp_path / "base"
    image = "tiny" if kind == "docker" else ""

    async def main() -> None:
        factory = make(kind)
        factory.sweep()  # what test runs that were killed earlier left on a shared engine
        command = [sys.executable, "-c", KILLED_RUN, kind, str(base), EPISODE, image, seconds]
        other = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert other.stdout is not None and await other.stdout.readline() == b"ready\n"
        assert processes_with(f"sleep {seconds}")
        assert factory.sweep() == 0
        other.kill()
        await other.communicate()
        async with sandbox_of(factory, kind) as mine:
            assert factory.sweep() == 1
            for _ in range(100):
                if not processes_with(f"sleep {seconds}"):
                    break
                await asyncio.sleep(0.05)
            assert processes_with(f"sleep {seconds}") == [] and containers_of(factory) == 0
            assert (await mine.run(["echo", "alive"], ENV, 20)).stdout == b"alive\n"
        assert factory.sweep() == 0 and left_in(base) == []

    asyncio.run(main())


def test_the_proxy_is_all_there_is_of_a_network(
    kind: str, make: MakeFactory, request: pytest.FixtureRequest
) -> None:
    if kind == "docker":
        request.getfixturevalue("docker_images")("base")
    code = """
import json, socket, sys, urllib.request
url, port = sys.argv[1], int(sys.argv[2])
seen = {"answer": urllib.request.urlopen(url + "/e/1", timeout=5).read().decode()}
for name, address in {"host": ("127.0.0.1", port), "world": ("192.0.2.1", 80)}.items():
    try:
        socket.create_connection(address, timeout=2).close()
        seen[name] = "reached"
    except OSError:
        seen[name] = "refused"
print(json.dumps(seen))
"""

    async def main() -> None:
        async with origin() as server:
            options: dict[str, object] = {**server.reach(kind), "image": "base"}
            async with sandbox_of(make(kind), kind, **options) as sandbox:
                argv = ["python3", "-I", "-c", code, sandbox.base_url, str(server.port)]
                done = await sandbox.run(argv, ENV, 30)
                assert done.returncode == 0, done.stderr
                seen = json.loads(done.stdout)
                assert seen["answer"] == "GET /e/1 HTTP/1.1"
                if kind != "process":
                    assert (seen["host"], seen["world"]) == ("refused", "refused")

    asyncio.run(main())


def test_a_wrong_way_to_the_proxy_is_refused(kind: str, make: MakeFactory, tmp_path: Path) -> None:
    async def main() -> None:
        factory = make(kind)
        wrong = {"endpoint_socket": tmp_path} if kind == "process" else {"network_port": 80}
        with pytest.raises(SandboxError, match=r"got only|no network"):
            await factory.create(spec(kind, **wrong))
        if kind != "process":
            with pytest.raises(SandboxError, match="start the proxy first"):
                await factory.create(spec(kind, endpoint_socket=tmp_path / "none"))
        assert left_in(tmp_path / "base") == []

    asyncio.run(main())

"""What a hostile program in an isolating sandbox cannot see or do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clawgym_jax.core.interfaces import Sandbox
from tests.sandbox.conftest import ENV, ISOLATED, MakeFactory, sandbox_of

pytestmark = pytest.mark.parametrize("kind", ISOLATED)


def test_paths_hostname_and_user_are_the_same_everywhere(kind: str, make: MakeFactory) -> None:
    async def look(sandbox: Sandbox) -> str:
        script = "pwd; echo ~; hostname; id -u; id -un; ls -ld . | cut -c1-10"
        return (
            await sandbox.run(["sh", "-c", script], ENV | {"HOME": sandbox.home}, 20)
        ).stdout.decode()

    async def main() -> None:
        factory = make(kind)
        deep = "/root/.openclaw/workspace"
        async with (
            sandbox_of(factory, kind) as one,
            sandbox_of(factory, kind) as two,
            sandbox_of(factory, kind, mount=deep) as three,
        ):
            seen = await look(one)
            assert seen == "/workspace\n/home/agent\nsandbox\n1000\nagent\ndrwx------\n"
            assert await look(two) == seen
            assert await look(three) == seen.replace("/workspace", deep, 1)

    asyncio.run(main())


def test_isolated_programs_see_nothing_of_the_host(
    kind: str, make: MakeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "secret-of-the-trainer")

    async def main() -> None:
        factory = make(kind)
        async with sandbox_of(factory, kind) as mine, sandbox_of(factory, kind) as other:
            (other.workspace_host / "answer").write_text("secret-of-the-other")
            script = f"""
                cat {other.workspace_host}/answer {other.workspace_host.parent}/work/answer
                ls {Path(__file__).parent} /home/agent/.. /srv /etc/shadow
                cat /etc/shadow
                cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep secret
                ls -d /proc/[0-9]* | wc -l
                for d in / /usr /etc /dev /run; do echo x > $d/mine && echo wrote $d; done
                true
            """
            done = await mine.run(["sh", "-c", script], ENV, 20)
            text = done.stdout.decode()
            assert "secret" not in text and "wrote" not in text
            assert "root:" not in text and "test_conformance" not in text
            count = next(int(line) for line in text.splitlines() if line.strip().isdigit())
            assert count < 15

    asyncio.run(main())

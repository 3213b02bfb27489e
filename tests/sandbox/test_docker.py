"""What only containers can do: limits on the whole sandbox; and how images are named."""

from __future__ import annotations

import asyncio

import pytest

from clawgym_jax.core.errors import ConfigError, SandboxError
from clawgym_jax.sandbox import recipes
from tests.sandbox.conftest import ENV, MakeFactory, sandbox_of, spec


@pytest.mark.docker
def test_memory_and_processes_are_limited_as_a_whole(make: MakeFactory) -> None:
    async def main() -> None:
        async with sandbox_of(make("docker"), "docker", memory_bytes=64 << 20, pids=30) as sandbox:
            eats = await sandbox.run(["sh", "-c", "tail -c 200m /dev/zero | wc -c"], ENV, 30)
            assert eats.stdout.strip() != b"209715200"
            forks = "i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done; echo all"
            many = await sandbox.run(["sh", "-c", forks], ENV, 30)
            assert b"all" not in many.stdout
            assert (await sandbox.run(["echo", "well"], ENV, 30)).stdout == b"well\n"

    asyncio.run(main())


@pytest.mark.docker
def test_privileges_are_gone(make: MakeFactory) -> None:
    script = """
        grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
        mount -t tmpfs none /mnt 2>/dev/null && echo mounted
        unshare -r true 2>/dev/null && echo unshared
        ip link 2>/dev/null | grep -c '^[0-9]'
    """

    async def main() -> None:
        async with sandbox_of(make("docker"), "docker") as sandbox:
            done = await sandbox.run(["sh", "-c", script], ENV, 30)
            words = done.stdout.decode().split()
            assert words[:8:2] == ["CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:"]
            assert int(words[1], 16) == int(words[3], 16) == 0
            assert words[5:8:2] == ["1", "2"] and words[8:] == ["1"]

    asyncio.run(main())


@pytest.mark.docker
def test_an_image_that_is_not_built_says_how(make: MakeFactory) -> None:
    async def main() -> None:
        with pytest.raises(SandboxError, match=r"launch/images\.py --images=clawgym/none"):
            await make("docker").create(spec("docker", image="clawgym/none:1"))

    asyncio.run(main())


def test_tags_follow_content() -> None:
    tags = [recipes.tag(name) for name in recipes.RECIPES]
    assert len({tag.rpartition(":")[2] for tag in tags}) == len(tags)
    assert recipes.tag("pi") == recipes.tag("pi") != recipes.tag("pi", base="debian:x")
    assert recipes.tag("tiny", "debian:x") != recipes.tag("base", "debian:x")
    with pytest.raises(ConfigError, match="expected one of tiny, base"):
        recipes.tag("nope")
    for found in recipes.RECIPES.values():
        assert all(package.count("@") >= 1 and package[-1].isdigit() for package in found.npm)

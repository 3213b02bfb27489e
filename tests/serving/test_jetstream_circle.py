"""The whole circle with JetStream in the engine's place: every call as with the native driver."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clawgym_jax.core.metrics_file import read_metrics
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.rollout.store import CALLS
from tests.serving.test_jetstream import extra as extra
from tests.test_circle import ROOT, SMALL, command, environment

Calls = dict[tuple[str, str, int], list[int]]


def calls_of(workdir: Path, cache: Path, driver: str) -> Calls:
    argv = command(workdir, small=(*SMALL, "loop.steps=2", f"driver={driver}"))
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(cache), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [row for row in read_metrics(workdir) if "decoded_tok" in row]
    assert steps and all(row["engine_restarts"] == 0 for row in steps)
    return {
        (c.episode_id, c.chain, c.ordinal): c.completion.ids.tolist()
        for c in read_calls(workdir / CALLS)
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Calls:
    return calls_of(tmp_path_factory.mktemp("native") / "run", cache, "native")


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["jetstream", "jetstream_process"])
def test_a_run_makes_the_same_calls(
    driver: str, native: Calls, cache: Path, tmp_path: Path
) -> None:
    assert native and calls_of(tmp_path / "run", cache, driver) == native

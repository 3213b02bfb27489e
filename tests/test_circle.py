"""The whole circle through `launch/train.py`, killed and resumed, and trained again from its log.

Real programs in real (plain process) sandboxes, the real proxy, engine and trainer; only small.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from clawgym_jax.core.metrics_file import read_metrics
from clawgym_jax.core.types import Outcome
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.rollout.store import EpisodeStore

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "sandbox=process", "cold_start.demonstrations=6", "cold_start.updates=6",
    "cold_start.rollouts_per_update=6", "loop.cold_checkpoint_every=3", "loop.steps=3",
    "loop.instances=4", "loop.group_size=4", "loop.reinforce.minibatches=2", "tasks.heldout=2",
    "engine.slots=8", "engine.prefill_chunks=96,384", "engine.kv_buckets=768",
    "rollout.concurrency=8", "model.micro_rows=1", "engine.routing=True",
)  # fmt: skip
# What an update computes; seconds and the engine's side differ between a live and an offline run.
COMPUTED = (
    "loss", "grad_norm", "update_norm", "entropy", "nll", "clip_share", "kl_old", "trained_tok",
    "reward_mean", "sampled_tok", "tree_tok", "logprob_gap_max", "value_loss", "value_grad_norm",
    "explained_variance", "kl_ref", "correction_mean", "strayed_routes", "balance",
)  # fmt: skip
PPO = (
    "batch.algorithm=ppo", "batch.lam=0.9", "critic.pretrain_steps=1", "critic.epochs=2",
    "loop.steps=2", "loss.kl_coef=0.02", "loop.reinforce.max_logprob_gap=0.0",
    "batch.replay_routes=True", "loss.balance_coef=0.01",
)  # fmt: skip


def command(workdir: Path, *flags: str, small: tuple[str, ...] = SMALL) -> list[str]:
    return [
        sys.executable, str(ROOT / "launch" / "train.py"),
        f"--experiment={ROOT / 'experiments' / 'quickstart.py'}", f"--workdir={workdir}",
        *(f"--override={setting}" for setting in small), *flags,
    ]  # fmt: skip


def environment(cache: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }


def train(workdir: Path, cache: Path, *flags: str) -> dict[str, object]:
    done = subprocess.run(
        command(workdir, *flags), capture_output=True, text=True, env=environment(cache), cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def computed(workdir: Path) -> list[dict[str, float]]:
    return [
        {"stage": m["stage"], "step": m["step"], **{k: m[k] for k in COMPUTED if k in m}}
        for m in read_metrics(workdir)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A live run that was killed (-9) during a step's rollouts, then finished by a second one."""
    workdir = tmp_path_factory.mktemp("circle") / "run"
    process = subprocess.Popen(
        command(workdir), env=environment(cache), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: any(m["stage"] == "train" for m in read_metrics(workdir)), process)
        before = (workdir / "episodes.log").stat().st_size
        wait_for(lambda: (workdir / "episodes.log").stat().st_size > before + 300, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (workdir / "at_kill").write_text(json.dumps(sorted(episodes_of(workdir))))
    result = train(workdir, cache)
    assert set(result) == {"before", "after", "seconds", "workdir"}
    assert set(result["after"]) == {"tiny_chat", "tiny_shell"}  # type: ignore[call-overload]
    return workdir


def wait_for(condition, process: subprocess.Popen[bytes], timeout_s: float = 240) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end, "the run did not get that far in time"
        time.sleep(0.01)


def episodes_of(workdir: Path) -> dict[str, object]:
    store = EpisodeStore(workdir)
    return {
        e.record.episode_id: e
        for split in ("demo", "heldout-before", "train", "heldout-after")
        for step in store.steps(split)
        for e in store.of(split, step)
    }


def test_every_episode_of_the_plan_is_there_once_and_none_was_run_twice(killed: Path) -> None:
    episodes = episodes_of(killed)
    splits = Counter(e.record.split for e in episodes.values())
    assert splits == {"demo": 12, "heldout-before": 4, "train": 48, "heldout-after": 4}
    runs = Counter(c.call_id.rsplit(".", 2)[0] for c in read_calls(killed / "calls.log"))
    kept = json.loads((killed / "at_kill").read_text())
    assert 12 + 4 + 16 < len(kept) < len(episodes)
    for name in kept:
        assert runs[name] == len(episodes[name].calls), f"{name} was finished and run again"
    assert all(e.record.outcome is not Outcome.INFRASTRUCTURE for e in episodes.values())


def test_the_engine_and_the_trainer_agree_on_every_sampled_token(killed: Path) -> None:
    steps = [m for m in read_metrics(killed) if m["stage"] == "train"]
    assert [m["step"] for m in steps] == [1, 2, 3]
    for m in steps:
        assert m["logprob_gap_max"] < 1e-4
        dropped = sum(v for k, v in m.items() if k.startswith("dropped_tok/"))
        assert m["sampled_tok"] == m["trained_tok"] + dropped
    versions = {
        m: {int(v) for e in EpisodeStore(killed).of("train", m) for c in e.calls
            for v in c.completion.versions}
        for m in range(3)
    }  # fmt: skip
    assert versions == {0: {2}, 1: {3}, 2: {4}}, "a step is rolled out by its own version"


def test_offline_training_repeats_the_run_bit_for_bit(
    killed: Path, cache: Path, tmp_path: Path
) -> None:
    """The run was killed and resumed; the replay was not: the same numbers, the same weights."""
    replay = tmp_path / "replay"
    train(replay, cache, f"--from_calls={killed}")
    assert computed(replay) == computed(killed)
    weights = "model/model.safetensors"
    assert (replay / weights).read_bytes() == (killed / weights).read_bytes()


def test_a_killed_replay_resumes_bit_for_bit(killed: Path, cache: Path, tmp_path: Path) -> None:
    replay = tmp_path / "replay"
    process = subprocess.Popen(
        command(replay, f"--from_calls={killed}"),
        env=environment(cache), cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: len(read_metrics(replay)) >= 4, process)  # within the cold start
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    train(replay, cache, f"--from_calls={killed}")
    assert computed(replay) == computed(killed)
    weights = "model/model.safetensors"
    assert (replay / weights).read_bytes() == (killed / weights).read_bytes()


def test_ppo_killed_again_and_again_ends_as_if_undisturbed(
    killed: Path, cache: Path, tmp_path: Path
) -> None:
    """Trained offline from the recorded run: value pretraining, KL to the first policy, GAE.

    One run is left alone; the other is killed in its cold start, and in or after every step,
    wherever it is then, its asynchronous checkpoints included.
    """
    small = (*SMALL, *PPO)
    alone, hunted = tmp_path / "alone", tmp_path / "hunted"
    train(alone, cache, f"--from_calls={killed}", *(f"--override={setting}" for setting in PPO))
    lines = computed(alone)
    assert [m["step"] for m in lines if m["stage"] == "train"] == [1, 2, 3]
    assert all("value_loss" in m for m in lines if m["stage"] == "train")
    assert "entropy" not in lines[-3] and "kl_ref" in lines[-1]  # the first trains values only
    rng = random.Random(0)
    for count in (2, 6, 7, 8):
        process = subprocess.Popen(
            command(hunted, f"--from_calls={killed}", small=small),
            env=environment(cache), cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(lambda n=count: len(read_metrics(hunted)) >= n, process)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.5))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    train(hunted, cache, f"--from_calls={killed}", *(f"--override={setting}" for setting in PPO))
    assert computed(hunted) == lines
    weights = "model/model.safetensors"
    assert (hunted / weights).read_bytes() == (alone / weights).read_bytes()


def test_a_wrong_flag_is_an_error_without_a_traceback(tmp_path: Path, cache: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--override=loop.stepz=1"), capture_output=True, text=True,
        env=environment(cache), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "did you mean 'steps'" in done.stderr
    assert "Traceback" not in done.stderr

"""The loop's order of things, killed between any two of them: a small world in one process.

Episodes are made up from the weights that would have sampled them, and kept, as a run's log keeps
them. `tests/test_circle.py` does the same with real parts and real kills.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.metrics_file import read_metrics
from clawgym_jax.core.types import Episode
from clawgym_jax.model import qwen3
from clawgym_jax.rollout.episode import Instance
from clawgym_jax.train.checkpoint import Checkpoints
from clawgym_jax.train.critic import CriticConfig, trunk_config
from clawgym_jax.train.learner import Learner, ReinforceConfig
from clawgym_jax.train.loop import Loop, LoopConfig, Parts
from clawgym_jax.train.progress import Display
from clawgym_jax.train.run_folder import RunFolder
from clawgym_jax.train.sft import ColdStartConfig
from clawgym_jax.train.state import RunState
from clawgym_jax.train.step import TrainStep, ValueStep
from clawgym_jax.tree.pack import PackConfig
from tests.batch.episodes import episode
from tests.train.test_step import CONFIG, LOSS, MODEL, OPTIMIZER, policy
from tests.tree.histories import random_rollout

PACK = PackConfig(row_tok=128, train_tok=64)  # of one length: half the compilations
BATCH: BatchConfig = dataclasses.replace(CONFIG, pack=PACK, algorithm="ppo", lam=0.9)
STEPS = LoopConfig(steps=3, instances=3, group_size=2, checkpoint_every=2)
PRETRAIN = 2  # and no cold start
VERSIONS = {0: 2, 1: 2, 2: 2, 3: 3, 4: 4}  # of the weights that roll a step out
COMPUTED = ("loss", "grad_norm", "kl_ref", "value_loss", "explained_variance", "updates")


def live_bytes() -> int:
    """Of all arrays on the device that anything still refers to; views of one buffer count once."""
    gc.collect()
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


def bytes_of(*trees: Any) -> int:
    """Of arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


class Killed(Exception):
    """In place of a signal."""


@dataclass(frozen=True)
class Named:
    """All that a plan needs of a task or a harness."""

    task_id: str
    name: str = "h"


class World:
    """Sink and source. What is in `log` outlives the process, the rest does not."""

    def __init__(self) -> None:
        self.log: dict[str, Episode] = {}
        self.sampled_by: dict[str, int] = {}  # episode -> version
        self.events = 0
        self.fuse = -1  # kill at which event; -1 = none
        self._version, self._weights = 0, 0.0
        self.resident: list[tuple[str, int]] = []  # what happened, bytes of arrays meanwhile

    def happen(self) -> None:
        self.events += 1
        if self.events == self.fuse:
            raise Killed

    def publish(self, params: Any, version: int) -> None:
        self.happen()
        self.resident.append((f"publish {version}", live_bytes()))
        self._version = version
        self._weights = sum(float(np.abs(x).sum()) for x in jax.tree.leaves(params))

    def collect(
        self,
        plan: Sequence[Instance],
        sampler: Any,
        sampling: Any,
        on_policy: bool,
        on_done: Callable[[Episode], None],
    ) -> list[Episode]:
        for instance in plan:
            name = instance.episode_id
            if name not in self.log:
                self.happen()
                seed = zlib.crc32(f"{name} {self._weights:.4f}".encode())
                calls = random_rollout(seed, episode=name)
                self.log[name] = episode(name, calls, float(seed % 2), group=instance.group_id)
                self.sampled_by[name] = self._version
        return [self.log[instance.episode_id] for instance in plan]

    def usage(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def learner() -> Learner:
    graphdef, _ = policy()
    trunk, _ = qwen3.abstract(trunk_config(MODEL))
    values = CriticConfig(pretrain_steps=PRETRAIN, epochs=2, attention="dense")
    loss = dataclasses.replace(LOSS, kl_coef=0.05)
    return Learner(
        MODEL,
        TrainStep(graphdef, OPTIMIZER, loss, 1, row_tok=128),
        OPTIMIZER,
        BATCH,
        ReinforceConfig(minibatches=2, max_logprob_gap=0.0),
        ValueStep(trunk, OPTIMIZER, values, 1, row_tok=128),
        OPTIMIZER,
        values,
    )


def base() -> Any:
    """The parameters to start from, read anew."""
    return jax.tree.map(jnp.copy, policy()[1])


def run(
    folder: Path,
    world: World,
    learner: Learner,
    fuse: int = -1,
    cold: ColdStartConfig = ColdStartConfig(),  # noqa: B008
    base: Callable[[], Any] = base,
) -> RunState:
    """One process's life; ends with Killed at event `fuse` of this life."""
    world.events, world.fuse = 0, fuse
    tasks = [Named(f"t{i}") for i in range(8)]
    parts: Any = Parts(
        source=world, policy=None, demonstrator=object(), sink=world,
        cold_programs=learner.policy, cold_optimizer=OPTIMIZER, learner=learner,
        base=base, shapes=policy()[1], demo_tasks=tasks[:4], train_tasks=tasks,
        heldout_tasks=tasks[:1],
        harnesses=[Named("", "h")], summarise=lambda _: {},
    )  # type: ignore[arg-type]  # fmt: skip
    display = Display(Console(file=io.StringIO()))
    loop = Loop(parts, RunFolder(folder, {}), STEPS, cold, 0, 1.0, display)
    try:
        return loop.execute()[1]
    finally:
        loop.close()


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: m.get(k) for k in ("step", *COMPUTED)} for m in read_metrics(folder)]


def equal(a: RunState, b: RunState) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_killed_anywhere_a_run_ends_as_if_undisturbed(learner: Learner, tmp_path: Path) -> None:
    """Checkpoints every second step: steps are done again from the log, with the same weights."""
    alone = World()
    wanted = run(tmp_path / "alone", alone, learner)
    total = alone.events
    for name, version in alone.sampled_by.items():
        if name.startswith("train"):
            assert VERSIONS[int(name.split("-")[1][1:])] == version
    for fuses in ((1, total // 3), (total // 2, 2), (total - 1, 1), (2 * total // 3,)):
        world, folder = World(), tmp_path / "-".join(map(str, fuses))
        for fuse in fuses:
            with pytest.raises(Killed):
                run(folder, world, learner, fuse)
        assert equal(run(folder, world, learner), wanted)
        assert numbers(folder) == numbers(tmp_path / "alone")
        assert world.sampled_by == alone.sampled_by


def test_a_finished_run_gives_its_last_state_or_none(learner: Learner, tmp_path: Path) -> None:
    """Who asks writes it over model/: an earlier state, or the base model, would be lost work."""
    world = World()
    last = run(tmp_path, world, learner)
    assert equal(run(tmp_path, world, learner), last)
    checkpoints = tmp_path / "checkpoints"
    for gone in (checkpoints / str(PRETRAIN + STEPS.steps), checkpoints):
        shutil.rmtree(gone)
        with pytest.raises(RecordError, match="stay as they are"):
            run(tmp_path, world, learner)


def test_shapes_are_those_of_the_states_that_are_made(learner: Learner) -> None:
    made, shapes = learner.begin(base()), learner.shapes(policy()[1])
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert isinstance(b, jax.ShapeDtypeStruct) and (a.shape, a.dtype) == (b.shape, b.dtype)


def test_resident_is_what_the_stage_needs_and_no_more(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays on the device at each publication, fresh and resumed, to the byte.

    Needed: the base model before the cold start; then both models, their moments, the reference.
    What is written in the background is a copy: here the run waits for it.
    """
    params, state = bytes_of(policy()[1]), bytes_of(learner.shapes(policy()[1]))
    assert state > 6 * params * 0.9  # two models, two moments each
    cold = ColdStartConfig(demonstrations=4, updates=3, rollouts_per_update=2)
    run(tmp_path / "warm", World(), learner, cold=cold)  # compiled programs keep constants
    world, before = World(), live_bytes()
    restore, save, at_restore = Checkpoints.restore, Checkpoints.save, []

    def spy(self: Checkpoints, *arguments: Any) -> Any:
        at_restore.append(live_bytes() - before)
        return restore(self, *arguments)

    monkeypatch.setattr(Checkpoints, "restore", spy)
    monkeypatch.setattr(Checkpoints, "save", lambda self, *a: (save(self, *a), self.wait()))
    last = run(tmp_path / "fresh", world, learner, cold=cold)
    training = state + params
    expected = [("publish 1", params), ("publish 2", training), ("publish 3", training),
                ("publish 4", training), ("publish 5", training)]  # fmt: skip
    assert [(name, size - before) for name, size in world.resident] == expected
    assert at_restore[-1] == state  # of the reference
    assert live_bytes() - before == bytes_of(last)
    del last

    def lost() -> Any:
        raise AssertionError("a run that resumes needs no base model")

    world, folder = World(), tmp_path / "killed"
    with pytest.raises(Killed):
        run(folder, world, learner, fuse=16, cold=cold)
    at_restore.clear()
    world.resident.clear()
    run(folder, world, learner, cold=cold, base=lost)
    assert [size - before for _, size in world.resident] == [training] * len(world.resident)
    assert at_restore == [0, state] and world.resident

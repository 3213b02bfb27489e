"""Chooses the classes behind the interfaces and puts a run together from its configuration.

The only file that knows which sampler, sandbox, harness and task source stands behind a name.
Invariant: everything opened here is closed by `Assembly.close`, in reverse order.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clawgym_jax.config import TINY_BASE, ExperimentConfig, ModelSource, check, to_dict
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Harness, Sampler, Task, WeightSink
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.names import Split
from clawgym_jax.evaluate.passk import score_by_harness
from clawgym_jax.harness.agent_loop import AgentLoop
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.codex import Codex
from clawgym_jax.harness.generic import Generic
from clawgym_jax.harness.mini_swe import MiniSwe
from clawgym_jax.harness.openclaw import OpenClaw
from clawgym_jax.harness.opencode import OpenCode
from clawgym_jax.harness.pi import Pi
from clawgym_jax.harness.qwen_code import QwenCode
from clawgym_jax.harness.tiny_chat import TinyChat
from clawgym_jax.harness.tiny_shell import TinyShell
from clawgym_jax.model import hf_weights, qwen3, sharding
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.rollout.demonstrator import Demonstrator
from clawgym_jax.rollout.scheduler import RolloutHost
from clawgym_jax.rollout.scripted import ScriptedSampler
from clawgym_jax.rollout.store import CALLS, EPISODES, EpisodeStore
from clawgym_jax.sandbox.select import make_sandboxes
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.jetstream_driver import JetStreamDriver
from clawgym_jax.serving.jetstream_process import JetStreamProcess
from clawgym_jax.serving.metrics import Measured, UsageMeter
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.tasks.clawgym import load_tasks
from clawgym_jax.tasks.toy import toy_tasks
from clawgym_jax.train.critic import trunk_config
from clawgym_jax.train.learner import Learner
from clawgym_jax.train.loop import Loop, Parts
from clawgym_jax.train.policy import SFT, LossConfig
from clawgym_jax.train.progress import Display
from clawgym_jax.train.run_folder import RunFolder
from clawgym_jax.train.sources import LiveEpisodes, RecordedEpisodes
from clawgym_jax.train.state import make_optimizer
from clawgym_jax.train.step import TrainStep, ValueStep

HARNESSES: dict[str, Callable[[], Harness]] = {
    "tiny_chat": TinyChat,
    "tiny_shell": TinyShell,
    "agent_loop": AgentLoop,
    "claude_code": ClaudeCode,
    "codex": Codex,
    "mini_swe": MiniSwe,
    "openclaw": OpenClaw,
    "opencode": OpenCode,
    "pi": Pi,
    "qwen_code": QwenCode,
    "generic": Generic,
}
HELDOUT_SEED = 20_250_731  # held-out tasks are the same for every run


class Assembly:
    """A run, ready to execute. Use as a context manager."""

    def __init__(
        self,
        config: ExperimentConfig,
        workdir: Path,
        from_calls: Path | None = None,
        display: Display | None = None,
    ) -> None:
        self.config = config
        self.display = display or Display()
        self.folder = RunFolder(workdir, to_dict(config))
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(self.folder.lock())
            self._build(config, from_calls)
            self.folder.adopt()
        except BaseException:
            self._stack.close()
            raise

    def _build(self, config: ExperimentConfig, from_calls: Path | None) -> None:
        served = open_engine(config, self._stack)
        self.model_path, self.codec = served.path, served.codec
        self.model, self.driver = served.model, served.driver
        source: LiveEpisodes | RecordedEpisodes
        if from_calls is None:
            source = self._live()
        else:
            if not (from_calls / EPISODES).is_file():
                raise ConfigError(
                    f"--from_calls: expected a run folder, found none at {from_calls}"
                )
            self.folder.check_recorded(from_calls)
            source = RecordedEpisodes(EpisodeStore(from_calls))
        self.loop = Loop(
            self._parts(served, source, heldout=from_calls is None),
            self.folder,
            config.loop,
            config.cold_start,
            config.seed,
            config.evaluate.temperature,
            self.display,
        )
        self._stack.callback(self.loop.close)

    def _live(self) -> LiveEpisodes:
        store = EpisodeStore(self.folder.path)
        calls = self._stack.enter_context(RecordLog(self.folder.path / CALLS))
        episodes = self._stack.enter_context(RecordLog(self.folder.path / EPISODES))
        sandboxes = make_sandboxes(self.config.sandbox)
        sandboxes.sweep()
        host = RolloutHost(
            f"{self.config.name}-{self.config.seed}",
            self.codec,
            calls,
            episodes,
            sandboxes,
            self.config.rollout,
        )
        self._stack.enter_context(host)
        return LiveEpisodes(host, store, UsageMeter(self.driver, self.config.engine.slots))

    def _parts(
        self, served: Served, source: LiveEpisodes | RecordedEpisodes, heldout: bool
    ) -> Parts:
        config = self.config
        parallel = Parallel.make(config.mesh)
        graphdef, shapes = qwen3.abstract(self.model, config.model.remat, parallel)
        if parallel is not None:
            sharding.check(self.model, shapes, parallel.mesh)
            shapes = sharding.shaped(shapes, parallel.mesh)
        cold_optimizer = make_optimizer(config.cold_start.optim)
        rows, row_tok = config.model.micro_rows, config.batch.pack.row_tok
        cold_loss = LossConfig(
            kind=SFT, attention=config.loss.attention, logit_chunk=config.loss.logit_chunk
        )
        return Parts(
            source=source,
            policy=self.driver,
            demonstrator=ScriptedSampler(Demonstrator(), self.codec, self.driver),
            sink=self.driver,
            cold_programs=TrainStep(graphdef, cold_optimizer, cold_loss, rows, parallel, row_tok),
            cold_optimizer=cold_optimizer,
            learner=make_learner(config, self.model, graphdef, parallel),
            base=functools.partial(served.params, None if parallel is None else shapes),
            shapes=shapes,
            demo_tasks=demo_tasks(config),
            train_tasks=train_tasks(config),
            heldout_tasks=heldout_tasks(config) if heldout else [],
            harnesses=[make_harness(name) for name in config.harnesses],
            summarise=lambda episodes: {
                name: score.as_dict() for name, score in score_by_harness(episodes).items()
            },
        )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_learner(
    config: ExperimentConfig, model: Qwen3Config, graphdef: Any, parallel: Parallel | None
) -> Learner:
    """The programs of policy and, with PPO, value model; `graphdef` is the policy's."""
    check(config, mixture=model.num_moe_layers > 0)
    rows, row_tok = config.model.micro_rows, config.batch.pack.row_tok
    optimizer, critic_optimizer = make_optimizer(config.optim), make_optimizer(config.critic.optim)
    critic = None
    if config.batch.algorithm == "ppo":
        trunk, _ = qwen3.abstract(trunk_config(model), config.model.remat, parallel)
        critic = ValueStep(trunk, critic_optimizer, config.critic, rows, parallel, row_tok)
    return Learner(
        model=model,
        policy=TrainStep(graphdef, optimizer, config.loss, rows, parallel, row_tok),
        optimizer=optimizer,
        batch=config.batch,
        reinforce=config.loop.reinforce,
        critic=critic,
        critic_optimizer=critic_optimizer,
        critic_config=config.critic,
        parallel=parallel,
    )


class Driver(Sampler, WeightSink, Measured, Protocol):
    """An engine that samples, takes weights and counts."""


@dataclass(frozen=True)
class Served:
    """A model with its engine; `driver.publish(params, version)` starts it."""

    path: Path
    codec: ChatCodec
    model: Qwen3Config
    driver: Driver

    def params(self, targets: Any = None) -> Any:
        """The weights, read anew. targets: those of `hf_weights.read`."""
        return hf_weights.read(self.path, self.model, targets)[2]


def open_engine(config: ExperimentConfig, stack: contextlib.ExitStack) -> Served:
    """Puts an engine under a model; `stack` closes it. Raises ModelError for wrong files."""
    path = model_folder(config.model.path)
    options = {} if config.model.thinking else {"enable_thinking": False}
    codec = ChatCodec.from_folder(path, options)
    model = model_config(path, config.model)
    hf_weights.check(path, model)
    if config.driver == "jetstream_process":
        process = JetStreamProcess(path, model, config.engine, config.serving_mesh)
        return Served(path, codec, model, stack.enter_context(process))
    serving = ServingParallel.make(config.serving_mesh)
    graphdef, shapes = qwen3.abstract(model, parallel=serving)
    if serving is not None:
        sharding.check(model, shapes, serving.mesh, sharding.SERVING)
    engine = Engine(graphdef, model, config.engine, serving)
    driver: NativeDriver | JetStreamDriver
    if config.driver == "jetstream":
        driver = stack.enter_context(JetStreamDriver(engine, codec.decode))
    else:
        driver = stack.enter_context(NativeDriver(engine, codec.decode))
    return Served(path, codec, model, driver)


def model_folder(path: str) -> Path:
    """The shipped base model, or a folder of the user's."""
    folder = Path(__file__).parent / "data" / TINY_BASE if path == TINY_BASE else Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: expected {TINY_BASE!r} or a Hugging Face folder with config.json, "
            f"got {path!r}"
        )
    return folder


def model_config(folder: Path, source: ModelSource) -> Qwen3Config:
    """The folder's model as it is trained: float32 master weights, activations as wanted."""
    found = hf_weights.read_config(folder)
    dtype = np.dtype(source.dtype) if source.dtype else found.dtype
    return found.replace(dtype=dtype, param_dtype=np.dtype("float32"))


def make_harness(name: str) -> Harness:
    if name not in HARNESSES:
        raise ConfigError(f"harnesses: expected some of {', '.join(HARNESSES)}, got {name!r}")
    return HARNESSES[name]()


def train_tasks(config: ExperimentConfig) -> Sequence[Task]:
    return _tasks(config, "train", config.tasks.train, config.seed, config.tasks.root)


def heldout_tasks(config: ExperimentConfig) -> Sequence[Task]:
    """Fixed: the same for every seed and run."""
    source = config.tasks
    return _tasks(config, "heldout", source.heldout, HELDOUT_SEED, source.heldout_root)


def demo_tasks(config: ExperimentConfig) -> Sequence[Task]:
    count = config.cold_start.demonstrations
    return _tasks(config, "cold", count, config.seed, config.tasks.root)


def _tasks(
    config: ExperimentConfig, split: Split, count: int, seed: int, root: str
) -> Sequence[Task]:
    if config.tasks.kind == "toy":
        return toy_tasks(split, count, seed)
    if config.tasks.kind != "clawgym":
        raise ConfigError(f'tasks.kind: expected "toy" or "clawgym", got {config.tasks.kind!r}')
    if not root:
        return []
    tasks = load_tasks(Path(root))
    random.Random(f"{seed}/{split}").shuffle(tasks)
    return tasks[:count]

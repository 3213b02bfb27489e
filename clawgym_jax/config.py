"""An experiment as one frozen tree of dataclasses, and overrides from the command line.

`--override=loop.steps=5` sets a field; a wrong name is an error that names the nearest field, a
wrong value one that says what was expected. Not here: what the fields do (each beside its code).
Invariant: two equal configs make equal runs.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clawgym_jax.batch.config import GRPO, BatchConfig
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.parallel import MeshConfig
from clawgym_jax.model.parallel_serving import ServingMeshConfig
from clawgym_jax.model.remat import Remat
from clawgym_jax.rollout.scheduler import RolloutConfig
from clawgym_jax.serving.engine import EngineConfig
from clawgym_jax.train.critic import CriticConfig
from clawgym_jax.train.loop import LoopConfig
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.sft import ColdStartConfig
from clawgym_jax.train.state import OptimConfig

TINY_BASE = "tiny_base"
TINY = "tiny"
Driver = Literal["native", "jetstream", "jetstream_process"]
SCALES = {TINY: "CONFIG", "paper": "PAPER"}  # --override=scale=...: name in the experiment file


@dataclass(frozen=True)
class ModelSource:
    """Which weights to start from."""

    path: str = TINY_BASE  # the shipped base model, or a Hugging Face folder of a Qwen3
    thinking: bool = True  # False: the chat template's way to ask for answers without reasoning
    dtype: str = ""  # of activations: "float32" | "bfloat16"; "" = the folder's
    remat: Remat = "none"  # what the backward pass computes again: less memory, more time
    micro_rows: int = 4  # packed rows in one forward and backward pass, of all chips together

    def __post_init__(self) -> None:
        if self.dtype not in ("", "float32", "bfloat16"):
            raise ConfigError(f'model.dtype: expected "float32" or "bfloat16", got {self.dtype!r}')
        if self.micro_rows < 1:
            raise ConfigError(f"model.micro_rows: expected at least 1, got {self.micro_rows}")


@dataclass(frozen=True)
class TaskSource:
    """Which tasks to train and evaluate on."""

    kind: str = "toy"  # "toy" (made from the seed) | "clawgym" (folders)
    train: int = 4096
    heldout: int = 128
    root: str = ""  # folder of ClawGym tasks to train on
    heldout_root: str = ""  # folder of ClawGym tasks to evaluate on


@dataclass(frozen=True)
class EvalConfig:
    temperature: float = 1.0


@dataclass(frozen=True)
class ExperimentConfig:
    """Everything that makes a run."""

    name: str
    seed: int = 0
    sandbox: str = "bubblewrap"  # "auto" | "process" | "bubblewrap" | "docker"
    harnesses: tuple[str, ...] = ("tiny_chat", "tiny_shell")
    model: ModelSource = field(default_factory=ModelSource)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    serving_mesh: ServingMeshConfig = field(default_factory=ServingMeshConfig)
    tasks: TaskSource = field(default_factory=TaskSource)
    engine: EngineConfig = field(default_factory=EngineConfig)
    driver: Driver = "native"  # of the engine; JetStream's here or in a process of its own
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)  # with batch.algorithm=ppo
    optim: OptimConfig = field(default_factory=OptimConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if not self.harnesses:
            raise ConfigError("harnesses: expected at least one name, got none")
        if self.seed < 0:
            raise ConfigError(f"seed: expected at least 0, got {self.seed}")


def check(config: ExperimentConfig, mixture: bool) -> None:
    """What only the whole configuration tells: ConfigError before anything is rolled out.

    mixture: whether the model has experts.
    """
    for name, value in (
        ("batch.replay_routes", config.batch.replay_routes),
        ("loss.balance_coef", config.loss.balance_coef),
    ):
        if value and not mixture:
            raise ConfigError(
                f"{name}={value}: expected a mixture of experts, got a dense model; leave it unset"
            )
    if config.batch.replay_routes and not config.engine.routing:
        raise ConfigError(
            "batch.replay_routes: expected engine.routing=True, so that the engine records experts"
        )
    if config.cold_start.updates and not config.cold_start.demonstrations:
        raise ConfigError(
            f"cold_start.updates={config.cold_start.updates}: expected cold_start.demonstrations "
            "above 0, or updates=0 for no cold start"
        )
    _check_algorithm(config)
    _check_rows(config)


def _check_algorithm(config: ExperimentConfig) -> None:
    """A setting that the algorithm does not read is an error; so are groups without a baseline."""
    batch, plain = config.batch, BatchConfig()
    unread = {"batch.group": batch.group != plain.group}
    if batch.algorithm == GRPO:
        names = ("gamma", "lam", "whiten_advantages")
        unread = {f"batch.{n}": getattr(batch, n) != getattr(plain, n) for n in names}
        unread["critic.pretrain_steps"] = config.critic.pretrain_steps > 0
        if config.loop.group_size < 2:
            raise ConfigError(
                f"loop.group_size: expected at least 2 with grpo, got {config.loop.group_size}; "
                "a rollout that is alone has no baseline and would not be trained"
            )
    wrong = [name for name, changed in unread.items() if changed]
    if wrong:
        raise ConfigError(
            f"batch.algorithm={batch.algorithm} does not read {', '.join(wrong)}: expected the "
            "default there"
        )


def _check_rows(config: ExperimentConfig) -> None:
    """Every call that can be sampled fits a row; rows divide over the mesh."""
    pack, window = config.batch.pack, config.engine.window_tok
    longest = min(config.rollout.limits.max_tok, window)
    if pack.row_tok < window or pack.train_tok < longest:
        raise ConfigError(
            f"batch.pack: expected row_tok >= {window} (engine.window_tok) and train_tok >= "
            f"{longest} (the longest completion), got {pack.row_tok} and {pack.train_tok}"
        )
    uneven = [n for n, _ in pack.buckets if config.mesh.fsdp and n % config.mesh.x]
    if uneven:
        raise ConfigError(
            f"batch.pack: expected row_tok and shorter in multiples of mesh.x={config.mesh.x}, "
            f"got {uneven}"
        )


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def configure(path: Path, settings: Sequence[str]) -> ExperimentConfig:
    """An experiment file with overrides; "scale=paper" takes the file's `PAPER` to start from."""
    scales = [s.partition("=")[2] for s in settings if s.startswith("scale=")]
    others = [s for s in settings if not s.startswith("scale=")]
    return override(load_experiment(path, scales[-1] if scales else TINY), others)


def load_experiment(path: Path, scale: str = TINY) -> ExperimentConfig:
    """The `CONFIG` of an experiment file, or what it has at another scale."""
    import runpy

    if not path.is_file():
        files = sorted(Path("experiments").glob("*.py"))
        near = [p.as_posix() for p in files if "CONFIG = " in p.read_text(encoding="utf-8")]
        raise ConfigError(f"no experiment file at {path}; there are: {', '.join(near) or 'none'}")
    if scale not in SCALES:
        raise ConfigError(f"scale: expected one of: {', '.join(SCALES)}; got {scale!r}")
    found = runpy.run_path(str(path)).get(SCALES[scale])
    if not isinstance(found, ExperimentConfig):
        raise ConfigError(
            f"{path} must define {SCALES[scale]}, an ExperimentConfig, for scale={scale}; "
            f"got {found!r}"
        )
    return found


def override(config: ExperimentConfig, settings: Sequence[str]) -> ExperimentConfig:
    """Applies "path.to.field=value" settings, of one field the last.

    All settings of a dataclass are applied at once, so that it checks how its fields agree when
    none is half changed: the order of settings does not matter.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--override={setting}: expected path.to.field=value")
        _note(changes, config, path.split("."), text, path)
    return _replaced(config, changes)  # type: ignore[no-any-return]


def _note(changes: dict[str, Any], node: Any, path: list[str], text: str, whole: str) -> None:
    """Writes one setting into `changes`: field -> value, or the changes of the dataclass there."""
    names = [f.name for f in dataclasses.fields(node)]
    if path[0] not in names:
        near = difflib.get_close_matches(path[0], names, n=1)
        elsewhere = [p for p in _all_paths(node) if p.split(".")[-1] == path[-1]]
        near = (
            near
            or sorted(elsewhere, key=len)
            or difflib.get_close_matches(whole, _all_paths(node), n=1)
        )
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"--override={whole}: no field {path[0]!r}; {guess}fields here: {', '.join(names)}"
        )
    old = getattr(node, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(old):
            raise ConfigError(f"--override={whole}: {path[0]!r} is a value, it has no fields")
        _note(changes.setdefault(path[0], {}), old, path[1:], text, whole)
        return
    if dataclasses.is_dataclass(old):
        inner = [f.name for f in dataclasses.fields(old)]
        raise ConfigError(f"--override={whole}: name a field of it: {', '.join(inner)}")
    expected = typing.get_type_hints(type(node))[path[0]]
    changes[path[0]] = _parse(text, expected, whole)


def _replaced(node: Any, changes: dict[str, Any]) -> Any:
    """`node` with its changes, from the innermost dataclass outwards, each made once."""
    new = {}
    for name, change in changes.items():
        old = getattr(node, name)
        new[name] = _replaced(old, change) if dataclasses.is_dataclass(old) else change
    return dataclasses.replace(node, **new)


def _parse(text: str, expected: Any, whole: str) -> Any:
    """`text` as a value of the field's type."""
    if isinstance(expected, types.UnionType):
        options = [t for t in typing.get_args(expected) if t is not types.NoneType]
        if text == "None":
            return None
        expected = options[0]
    origin = typing.get_origin(expected) or expected
    if origin is str:
        return text
    if origin is typing.Literal:
        if text not in typing.get_args(expected):
            allowed = ", ".join(map(str, typing.get_args(expected)))
            raise ConfigError(f"--override={whole}={text}: expected one of: {allowed}")
        return text
    if origin is tuple:
        inner = typing.get_args(expected)[0]
        if text == "None" or any(bracket in text for bracket in "()[]"):
            raise ConfigError(
                f"--override={whole}={text[:80]}: expected {inner.__name__}s with commas between, "
                "without brackets"
            )
        return tuple(_parse(part.strip(), inner, whole) for part in text.split(",") if part.strip())
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if origin is float and type(value) is int:
        value = float(value)
    if type(value) is not origin or (origin is float and not math.isfinite(value)):
        shown = text[:80]
        raise ConfigError(f"--override={whole}={shown}: expected {origin.__name__}, got {shown!r}")
    return value


def _all_paths(node: Any, at: str = "") -> list[str]:
    out: list[str] = []
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        here = f"{at}.{f.name}".strip(".")
        out += _all_paths(value, here) if dataclasses.is_dataclass(value) else [here]
    return out

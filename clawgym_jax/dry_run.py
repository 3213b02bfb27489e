"""An experiment's programs for chips that are not here: lowered from shapes, nothing allocated.

Training's programs are those of `train.step` on the experiment's mesh; serving's those of
`serving.engine.Engine` on the chips of one host. Not here: compiling and counting (`compiled`).
Invariant: the programs are the ones that a run would use, made by the same code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from clawgym_jax.assemble import make_learner
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.compiled import ideal, load
from clawgym_jax.compiled.findings import Findings
from clawgym_jax.config import TINY_BASE, ExperimentConfig
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model import expert_parallel, hf_config, qwen3, sharding
from clawgym_jax.model.config import NAMED, Qwen3Config
from clawgym_jax.model.grouped_tpu import row_tile
from clawgym_jax.model.live_blocks import count_pairs, most_pairs
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.tree_attention_tpu import Tiling
from clawgym_jax.serving.attention import BLOCK
from clawgym_jax.serving.engine import Engine
from clawgym_jax.train.machine import Step
from clawgym_jax.train.state import TrainState

_POLICY = {"score": "old_logprobs", "accumulate": "accumulate", "apply": "apply"}
_CRITIC = {"score": "values", "accumulate": "value_accumulate", "apply": "value_apply"}


def model_of(config: ExperimentConfig) -> Qwen3Config:
    """The experiment's model: from its folder, or by the name of a released one."""
    path = config.model.path
    folder = Path(__file__).parent / "data" / TINY_BASE if path == TINY_BASE else Path(path)
    name = folder.name.lower().replace("-", "_")
    if (folder / hf_config.CONFIG).is_file():
        found = hf_config.read_config(folder)
    elif name in NAMED:
        found = NAMED[name]
    else:
        raise ConfigError(
            f"model.path={path}: expected a Hugging Face folder, or one of {', '.join(NAMED)}"
        )
    dtype = np.dtype(config.model.dtype) if config.model.dtype else found.dtype
    return found.replace(dtype=dtype, param_dtype=np.dtype("float32"))


@dataclass(frozen=True)
class Program:
    """One program, to be lowered when it is wanted: lowering takes seconds."""

    lower: Callable[[], jax.stages.Lowered]
    devices: int
    bounds: Mapping[str, int] = field(default_factory=dict)  # of loops whose length is data


@dataclass(frozen=True)
class Plan:
    """An experiment's programs on a slice, and what to measure them against."""

    chips: int
    mesh: dict[str, int]
    load: str  # the made-up data, in words
    programs: dict[str, Program]
    ideal_flops: dict[str, float]  # of one chip in one run
    shares: dict[str, float]  # of what a kernel could do at most, by a part of its name
    gmm_share: float | None  # rows computed / rows, of the grouped products
    blocks: dict[str, int]  # of attention, in one row
    state_bytes: int  # weights and moments of one chip, with PPO of both models
    params_bytes: Mapping[str, int]  # weights of one chip, by the program that gets them
    decode_bytes: int  # that a decode step has to read: weights, and all keys and values, once

    def describe(self) -> str:
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        blocks = ", ".join(f"{count} {name}" for name, count in self.blocks.items())
        return f"mesh {mesh}\nload: {self.load}\nattention block pairs of a row: {blocks}"

    def training(self, found: Mapping[str, Findings]) -> dict[str, int]:
        """What lies on a chip at the same time while it trains; empty if that was not compiled."""
        passes = [n for n in ("accumulate", "value_accumulate") if n in found]
        if "accumulate" not in passes:
            return {}
        parts = {
            "weights and optimiser state": self.state_bytes,
            "gradients and activations": max(
                found[name].peak.peak - self.params_bytes[name] for name in passes
            ),
        }
        if "decode" in found:
            parts["serving copy with keys and values"] = found["decode"].peak.arguments
        return parts

    def serving(self, found: Mapping[str, Findings]) -> dict[str, int]:
        """The same while rollouts are served."""
        peaks = [found[name].peak.peak for name in ("decode", "prefill") if name in found]
        if not peaks:
            return {}
        return {
            "weights and optimiser state": self.state_bytes,
            "serving copy, keys and values, working space": max(peaks),
        }

    def serving_alone(self, found: Mapping[str, Findings]) -> dict[str, int]:
        """The same where serving has chips of its own."""
        return {name: size for name, size in self.serving(found).items() if "copy" in name}


def plan(config: ExperimentConfig, devices: Sequence[Any], host_devices: Sequence[Any]) -> Plan:
    """Everything about an experiment on a slice, but for the compiling.

    host_devices: the chips of one host, where a copy of the policy is served.
    """
    model = model_of(config)
    parallel = Parallel.make(config.mesh, devices)
    if parallel is None:
        raise ConfigError("mesh: the experiment has none; give --mesh=FSDP,X")
    graphdef, shapes = qwen3.abstract(model, config.model.remat, parallel)
    sharding.check(model, shapes, parallel.mesh)
    learner = make_learner(config, model, graphdef, parallel)
    state = learner.shapes(shapes)
    batch = batch_shapes(config, parallel)
    programs = _training(learner.policy, state.policy, batch, _POLICY, len(devices))
    params_bytes = {"accumulate": _bytes_of(state.policy.params)}
    if learner.critic is not None:
        value = learner.value_state(state)
        programs |= _training(learner.critic, value, batch, _CRITIC, len(devices))
        params_bytes["value_accumulate"] = _bytes_of(value.params)
    serving, decode_bytes = _serving(config, model, host_devices)
    programs |= serving
    row = config.batch.pack.row_tok
    layout = load.plan_for(row)
    end = load.row_end(row, layout)
    tokens = load.used_tok(end)
    blocks, attention_share = _attention(end)
    gmm_share, gmm_run = _grouped(config, model, parallel)
    forward = ideal.forward_flops(
        model,
        tokens * config.model.micro_rows,
        config.batch.pack.train_tok * config.model.micro_rows,
        int((end - np.arange(row)).sum()) * config.model.micro_rows,
    )
    ideal_flops = _ideal(_POLICY, forward.total / len(devices))
    if learner.critic is not None:
        ideal_flops |= _ideal(_CRITIC, forward.trunk / len(devices))
    return Plan(
        chips=len(devices),
        mesh=parallel.size,
        load=f"rows of {row} tokens, {tokens} used: {layout.describe()}; an even router",
        programs=programs,
        ideal_flops=ideal_flops,
        shares={"tree_attention": attention_share, "gmm": gmm_run},
        gmm_share=gmm_share,
        blocks=blocks,
        state_bytes=_bytes_of(state),
        params_bytes=params_bytes,
        decode_bytes=decode_bytes,
    )


def _training(
    step: Step, state: TrainState, batch: TreeBatch, names: Mapping[str, str], devices: int
) -> dict[str, Program]:
    """A model's programs of training; names: what we call those of `Step.lower`."""
    lower = functools.cache(lambda: step.lower(state, batch))
    return {
        name: Program(lambda of=of: lower()[of], devices)  # type: ignore[misc]
        for of, name in names.items()
    }


def _ideal(names: Mapping[str, str], forward: float) -> dict[str, float]:
    """Of a model's programs that run through it; forward: FLOPs of one chip in one pass."""
    return {names["score"]: forward, names["accumulate"]: ideal.BACKWARD * forward}


def _serving(
    config: ExperimentConfig, model: Qwen3Config, devices: Sequence[Any]
) -> tuple[dict[str, Program], int]:
    """Decode and prefill on the chips of one host, and the bytes that a decode step has to read."""
    parallel = ServingParallel.make(config.serving_mesh, devices)
    graphdef, shapes = qwen3.abstract(model, parallel=parallel)
    if parallel is None:
        where = jax.sharding.SingleDeviceSharding(devices[0])
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes
        )
    else:
        sharding.check(model, shapes, parallel.mesh, sharding.SERVING)
    engine = Engine(graphdef, model, config.engine, parallel)
    lower = functools.cache(lambda: engine.lower(shapes))
    blocks = {"closed_call/while": -(-config.engine.window_tok // BLOCK)}  # of a chunk's keys
    count = 1 if parallel is None else len(devices)
    programs = {
        name: Program(lambda name=name: lower()[name], count, blocks)  # type: ignore[misc]
        for name in ("decode", "prefill", *(["decode_few"] if config.engine.decode_rows else []))
    }
    return programs, _decode_bytes(engine, shapes)


def _decode_bytes(engine: Engine, shapes: Any) -> int:
    """Of one chip: all weights but the rows of the embedding, all keys and values of the slots."""
    params, state = engine.shapes(shapes)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    tied = engine.model.tie_word_embeddings
    read = [leaf for path, leaf in leaves if tied or "embed" not in jax.tree_util.keystr(path)]
    kept = sum(
        _bytes_of((k, v)) * room.slots // (room.slots + 1)
        for room, k, v in zip(engine.rooms, state.k, state.v, strict=True)
    )
    return _bytes_of(read) + kept


def _attention(end: np.ndarray) -> tuple[dict[str, int], float]:
    """Counts of block pairs in a row, and the share of a causal row's that is live."""
    tiling = Tiling()
    counts = count_pairs(end, tiling.block_q, tiling.block_k)
    most = most_pairs(len(end), tiling.block_q, tiling.block_k)
    blocks = {"causal": most, "live": int(counts.live), "full": int(counts.full)}
    return blocks, int(counts.live) / most


def _grouped(
    config: ExperimentConfig, model: Qwen3Config, parallel: Parallel
) -> tuple[float | None, float]:
    """Rows that grouped products compute, over the rows there are and over their buffer's."""
    if not model.num_experts:
        return None, 1.0
    chips = parallel.size[sharding.X]
    tokens = config.batch.pack.row_tok * config.model.micro_rows // parallel.size[sharding.FSDP]
    even = tokens * model.num_experts_per_tok // chips
    room = expert_parallel.capacity(
        tokens // chips, model.num_experts_per_tok, chips, parallel.expert_buffer
    )
    own = model.num_experts // chips
    visited = load.visited_rows(load.group_sizes(even, own), row_tile(room, own))
    return visited / even, visited / room


def _bytes_of(tree: Any) -> int:
    """Of one chip, for shapes that know their sharding."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def batch_shapes(config: ExperimentConfig, parallel: Parallel) -> TreeBatch:
    """One pass's rows as shapes that know their sharding."""
    rows, pack = config.model.micro_rows, config.batch.pack
    where = jax.sharding.NamedSharding(parallel.mesh, sharding.ROWS)

    def shape(width: int, dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), dtype, sharding=where)

    context = dict.fromkeys(("tokens", "position", "end"), shape(pack.row_tok, np.int32))
    context["balance"] = shape(pack.row_tok, np.float32)
    integers = dict.fromkeys(("target", "pred"), shape(pack.train_tok, np.int32))
    names = {field.name for field in dataclasses.fields(TreeBatch)}
    others = names - {*context, *integers, "mask", "routes"}
    floats = dict.fromkeys(others, shape(pack.train_tok, np.float32))
    mask = shape(pack.train_tok, np.bool_)
    return TreeBatch(mask=mask, routes=None, **context, **integers, **floats)

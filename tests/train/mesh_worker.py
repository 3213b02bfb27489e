"""A process of the mesh tests: the train step on virtual chips against one device.

    python -m tests.train.mesh_worker CASE [CASE ...] [--process=I --of=N --port=P]

Prints one JSON object a line: what a case measured. A process of its own, since the number of
virtual devices is fixed when jax starts; with --of=2 it is one of two that make one mesh.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from clawgym_jax.batch.fill import at_rollouts, fill
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import CapacityError
from clawgym_jax.model import qwen3, sharding
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel import MeshConfig, Parallel
from clawgym_jax.train.checkpoint import Checkpoints
from clawgym_jax.train.critic import CriticConfig, init_critic, trunk_config
from clawgym_jax.train.machine import Step
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.state import (
    OptimConfig,
    TrainState,
    init_state,
    make_optimizer,
    state_shapes,
)
from clawgym_jax.train.step import TrainStep, ValueStep
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig, pack
from tests.tree.histories import random_rollout

DENSE = Qwen3Config(
    vocab_size=32, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8,
    intermediate_size=64, tie_word_embeddings=True,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "moe": DENSE.replace(
        num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, tie_word_embeddings=False,
    ),
}  # fmt: skip
LOSS = LossConfig(
    clip_low=0.1, clip_high=0.15, kl_coef=0.05, entropy_coef=0.01, logit_chunk=24, attention="dense"
)
BALANCE = {"dense": 0.0, "moe": 0.02}  # a dense model has no experts to balance
CRITIC = CriticConfig(clip_eps=0.3, attention="dense")
POLICY, VALUE = "policy", "value"
OPTIMIZER = make_optimizer(OptimConfig(learning_rate=1e-3, grad_clip=0.5))
ROWS, MICRO_ROWS, ROW_TOK = 16, 8, 64


@dataclasses.dataclass
class Side:
    """A train step on one device or on a mesh, with its own copy of the same parameters."""

    programs: Step
    params: Any
    parallel: Parallel | None = None

    def state(self) -> TrainState:
        return init_state(self.params, OPTIMIZER, self.parallel)

    def state_shapes(self) -> TrainState:
        return state_shapes(self.params, OPTIMIZER, self.parallel)

    def loss_and_gradients(self, batch: TreeBatch) -> tuple[float, Any]:
        load = None
        if isinstance(self.programs, TrainStep) and self.programs.loss.balance_coef:
            load = self.programs.load(self.params, [batch])
        grads, losses, _ = self.programs.gradients(self.params, [batch], load)
        return float(sum(map(float, losses))), grads

    def scores(self, batch: TreeBatch) -> np.ndarray:
        """Log-probs, or values."""
        if isinstance(self.programs, TrainStep):
            return self.programs.logprobs(self.params, batch)
        assert isinstance(self.programs, ValueStep)
        return self.programs.values(self.params, batch)


def packed_batch() -> TreeBatch:
    """Random rollouts with forks and retries, packed; the last rows are empty."""
    keep = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
    made = [random_rollout(i, episode=f"e{i}", vocab=29, max_prompt=40) for i in range(14)]
    (rows,) = pack([select_calls(c, keep) for c in made], PackConfig(row_tok=ROW_TOK, train_tok=40))
    rng = np.random.default_rng(0)
    weight, advantage = rng.uniform(0.01, 0.05, 14), rng.normal(size=14)
    batch = fill(rows, at_rollouts(rows, weight), at_rollouts(rows, advantage))

    def drawn(low: float, high: float) -> np.ndarray:
        values = rng.uniform(low, high, batch.mask.shape)
        return np.where(batch.mask, values, 0.0).astype(np.float32)

    batch = batch.replace(
        correction=drawn(0.5, 1.5),
        ref_logprobs=drawn(-4.0, -1.0),
        returns=drawn(0.0, 1.0),
        old_values=drawn(0.0, 1.0),
    )
    return batch.padded(ROWS)


def with_routes(batch: TreeBatch) -> TreeBatch:
    """Recorded experts for every second token: two different ones of eight."""
    model = MODELS["moe"]
    rng = np.random.default_rng(1)
    order = rng.random((batch.rows, model.num_layers, ROW_TOK, model.num_experts)).argsort(-1)
    routes = order[..., : model.num_experts_per_tok].astype(np.int16)
    routes[:, :, ::2] = -1
    return batch.replace(routes=routes)


@functools.cache
def one_device(name: str, kind: str = POLICY) -> Side:
    model = MODELS[name]
    graphdef, params = qwen3.init(model, jax.random.key(0))
    params = jax.tree.map(lambda p: np.asarray(5.0 * p if p.ndim > 2 else p), params)
    if kind == VALUE:
        graphdef, _ = qwen3.abstract(trunk_config(model))
        params = init_critic(model, params)
        params["value"] = np.random.default_rng(2).normal(size=model.hidden_size) / 8
        params = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
    return Side(make_step(name, kind, graphdef), jax.tree.map(jnp.asarray, params))


def make_step(
    name: str, kind: str, graphdef: Any, *parallel: Parallel, attention: str = ""
) -> Step:
    if kind == VALUE:
        return ValueStep(graphdef, OPTIMIZER, CRITIC, MICRO_ROWS, *parallel)
    loss = dataclasses.replace(
        LOSS, balance_coef=BALANCE[name], attention=attention or LOSS.attention
    )
    return TrainStep(graphdef, OPTIMIZER, loss, MICRO_ROWS, *parallel)


def on_mesh(
    name: str, config: MeshConfig, kind: str = POLICY, remat: Any = "none", attention: str = ""
) -> Side:
    parallel = Parallel.make(config)
    assert parallel is not None
    model = MODELS[name] if kind == POLICY else trunk_config(MODELS[name])
    graphdef, shapes = qwen3.abstract(model, remat, parallel)
    sharding.check(model, shapes, parallel.mesh)
    programs = make_step(name, kind, graphdef, parallel, attention=attention)
    params = one_device(name, kind).params
    params = jax.device_put(params, sharding.shardings(params, parallel.mesh))
    return Side(programs, params, parallel)


def distances(got: Any, wanted: Any) -> dict[str, float]:
    """|got - wanted| / |wanted| by parameter, whole arrays on every process."""
    out = {}
    leaves = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, b), a in zip(leaves, jax.tree.leaves(got), strict=True):
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            a = multihost_utils.process_allgather(a, tiled=True)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        out[jax.tree_util.keystr(path)] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return out


@functools.cache
def expected(
    name: str, kind: str = POLICY, replay: bool = False
) -> tuple[TreeBatch, np.ndarray, tuple[float, Any]]:
    """One device's numbers: a batch off its policy, its log-probs or values, loss, gradients."""
    one, batch = one_device(name, kind), packed_batch()
    if replay:
        batch = with_routes(batch)
    scores = one.scores(batch)
    if kind == POLICY:
        batch = batch.replace(old_logprobs=(0.97 * scores).astype(np.float32))
    return batch, scores, one.loss_and_gradients(batch)


def compare(name: str, config: MeshConfig, replay: bool = False, **options: Any) -> dict[str, Any]:
    """Relative differences of loss and gradients between the mesh and one device."""
    batch, _, (wanted, wanted_grads) = expected(name, options.get("kind", POLICY), replay)
    loss, grads = on_mesh(name, config, **options).loss_and_gradients(batch)
    return {
        "loss": abs(loss - wanted) / abs(wanted),
        "gradients": distances(grads, wanted_grads),
    }


def compare_all(name: str, config: MeshConfig, **options: Any) -> dict[str, Any]:
    """The same, and old log-probs, and the state and metrics after three updates."""
    kind = options.get("kind", POLICY)
    one, many = one_device(name, kind), on_mesh(name, config, **options)
    batch, scores, _ = expected(name, kind)
    gap = many.scores(batch) - scores
    states = [many.state(), one.state()]
    for _ in range(3):
        (states[0], got), (states[1], wanted) = (
            side.programs.update(state, [batch])
            for side, state in zip((many, one), states, strict=True)
        )
    return compare(name, config, **options) | {
        "logprobs": float(np.abs(gap).max()),
        "state": distances(*states),
        "metrics": {key: abs(got[key] - value) for key, value in wanted.items()},
    }


# --- cases ---------------------------------------------------------------------------------


def overflow() -> dict[str, Any]:
    """Too small a buffer: the update and the scoring fail, and the state is as it was."""
    many = on_mesh("moe", MeshConfig(2, 4, expert_buffer=1.0))
    state = many.state()
    said = []
    for call in (
        lambda: many.programs.update(state, [packed_batch()]),
        lambda: many.scores(packed_batch()),
    ):
        try:
            call()
            said.append("nothing")
        except CapacityError as error:
            said.append(str(error))
    return {"said": said, "updates": int(state.updates)}


def empty_rows() -> dict[str, Any]:
    """Rows without a token, in a buffer that is half as large again as an even spread needs."""
    said = {}
    for form in ("all_gather", "ragged"):
        many = on_mesh("moe", MeshConfig(2, 4, form, expert_buffer=1.5))  # type: ignore[arg-type]
        batch = packed_batch()
        nothing = batch.padded(ROWS + MICRO_ROWS).rows_between(ROWS, ROWS + MICRO_ROWS)
        try:
            many.scores(nothing)
            said[form] = "nothing"
        except CapacityError as error:
            said[form] = str(error)
    return {"said": said}


def checkpoint() -> dict[str, Any]:
    """A sharded state comes back bit for bit, cut as it was."""
    many = on_mesh("dense", MeshConfig(2, 4))
    state, _ = many.programs.update(many.state(), [packed_batch()])
    with tempfile.TemporaryDirectory() as folder:
        kept = Checkpoints(Path(folder))
        kept.save(1, state, {"done": 1})
        kept.wait()
        found, _ = kept.restore(many.state_shapes())
        elsewhere = on_mesh("dense", MeshConfig(4, 2))
        other, moved = elsewhere.state(), kept.restore(elsewhere.state_shapes())[0]
        kept.close()
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True))
    both = list(zip(jax.tree.leaves(moved), jax.tree.leaves(other), strict=True))
    return {
        "equal": all(bool(jnp.array_equal(a, b)) for a, b in pairs),
        "placed": all(a.sharding == b.sharding for a, b in pairs),
        "moved": all(
            np.array_equal(np.asarray(a), np.asarray(b))
            for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True)
        ),
        "moved_placed": all(a.sharding == b.sharding for a, b in both),
    }


def serving() -> dict[str, Any]:
    """The serving table: XLA partitions the one-device program over (expert, tensor)."""
    graphdef, params = qwen3.init(MODELS["moe"], jax.random.key(0))
    chips = sharding.make_serving_mesh(4, 2)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 32)
    positions = jnp.tile(jnp.arange(16), (2, 1))

    @jax.jit
    def logits(params: Any) -> jax.Array:
        def attend(q: Any, k: Any, v: Any, cache: Any) -> Any:
            return dense_tree_attention(q, k, v, jnp.full((2, 16), 16)), cache

        out = qwen3.apply(graphdef, params, tokens, positions, attend)
        return qwen3.apply_logits(graphdef, params, out.hidden)

    placed = jax.device_put(params, sharding.shardings(params, chips, sharding.SERVING))
    return {"logits": float(jnp.max(jnp.abs(logits(placed) - logits(params))))}


def sabotaged(name: str, target: str, broken: Callable[..., Any]) -> dict[str, Any]:
    """One function replaced by a wrong one: the comparison must show it."""
    with mock.patch(target, broken):
        return compare(name, MeshConfig(2, 4, expert_buffer=8.0))


def _careless_sort(keys: Any) -> Any:
    order = jnp.argsort(keys, stable=True)
    return jnp.where(order == 5, keys.shape[0], order)  # one token loses one expert


def _keys_of_other_heads(self: Parallel, x: jax.Array) -> jax.Array:
    repeats = -(-self.mesh.shape["x"] // x.shape[2])
    x = jnp.tile(x, (1, 1, repeats, 1))  # instead of repeat: other heads' keys
    return jax.lax.all_to_all(x, "x", split_axis=2, concat_axis=1, tiled=True)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "moe 2x4 all_gather": lambda: compare_all("moe", MeshConfig(2, 4, "all_gather", 8.0)),
    "moe 4x2 ragged": lambda: compare(
        "moe", MeshConfig(4, 2, "ragged", 8.0), remat="products", attention="blocked"
    ),
    "moe 2x4 replay": lambda: compare("moe", MeshConfig(2, 4, "all_gather", 8.0), replay=True),
    "value moe 2x4": lambda: compare_all("moe", MeshConfig(2, 4, "all_gather", 8.0), kind=VALUE),
    "value dense 4x2": lambda: compare("dense", MeshConfig(4, 2), kind=VALUE),
    "moe 1x8 ragged": lambda: compare("moe", MeshConfig(1, 8, "ragged", 8.0)),
    "dense 2x4": lambda: compare_all("dense", MeshConfig(2, 4)),
    "dense 4x2": lambda: compare("dense", MeshConfig(4, 2)),
    "dense 8x1": lambda: compare("dense", MeshConfig(8, 1)),
    "overflow": overflow,
    "empty rows": empty_rows,
    "checkpoint": checkpoint,
    "serving": serving,
    "no sum over replicas": lambda: sabotaged(
        "dense", "clawgym_jax.train.mesh._over_replicas", lambda grad, place: grad
    ),
    "a token loses an expert": lambda: sabotaged(
        "moe", "clawgym_jax.model.expert_parallel._sorted", _careless_sort
    ),
    "other heads' keys": lambda: sabotaged(
        "dense", "clawgym_jax.model.parallel.Parallel._heads", _keys_of_other_heads
    ),
    "each chip its own maximum": lambda: sabotaged("dense", "jax.lax.pmax", lambda x, axis: x),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    if args.of > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.of, args.process)
    for case in args.cases:
        found = {"case": case, "devices": jax.device_count(), **CASES[case]()}
        if args.process == 0:
            print(json.dumps(found), flush=True)
    if args.of > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()

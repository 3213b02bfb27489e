"""Our training step on a form: loss, gradients, seconds, memory.

The step is `train.step.TrainStep`, one row in a pass; weights are random.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.model import hf_weights, qwen3
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.state import OptimConfig, init_state, make_optimizer
from clawgym_jax.train.step import TrainStep

LOSS = LossConfig(kind="clipped", attention="blocked")
MIB = 2**20


class Ours:
    """A model and its step, compiled for the forms that come."""

    def __init__(self, config: Qwen3Config) -> None:
        self.config = config
        self._graph, self.params = qwen3.init(config, jax.random.key(0))
        self._optimizer = make_optimizer(OptimConfig())
        self._step = TrainStep(self._graph, self._optimizer, LOSS)

    def gradients(self, batch: TreeBatch) -> tuple[float, Any]:
        """The loss of all rows, and its gradients (on the device)."""
        grads, losses, _ = self._step.gradients(self.params, [batch])
        return float(sum(np.asarray(loss) for loss in losses)), jax.block_until_ready(grads)

    def seconds(self, batch: TreeBatch) -> float:
        start = time.perf_counter()
        self.gradients(batch)
        return time.perf_counter() - start

    def mib(self, batch: TreeBatch) -> float:
        """Arguments (weights, gradients, a row) and temporary memory of the compiled pass."""
        state = init_state(self.params, self._optimizer)
        row = next(self._step.micros(batch))
        memory = self._step.lower(state, row)["accumulate"].compile().memory_analysis()
        assert memory is not None, "this backend does not say what memory a program needs"
        return float(memory.temp_size_in_bytes + memory.argument_size_in_bytes) / MIB

    def save(self, folder: str) -> None:
        """As transformers reads it."""
        hf_weights.write(folder, self.config, self.params)


def embedding(grads: Any) -> np.ndarray:
    """f32[V, D]"""
    return np.asarray(grads["embed"][...], np.float32)


def difference(a: Any, b: Any) -> float:
    """|a - b| / |b| over all gradients."""
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, a, b))
    return float(apart / optax.tree.norm(b))

"""One training step, the length curriculum and checkpoints of the tiny base model."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from clawgym_jax.model import attention, qwen3, tree_attention

# Row length, rows per batch, share of plain repetition, accuracy of repeats that ends it.
STAGES: tuple[tuple[int, int, float, float], ...] = (
    (48, 96, 0.5, 0.70),
    (96, 48, 0.2, 0.80),
    (128, 40, 0.1, 0.85),
    (256, 24, 0.08, 0.97),
    (512, 16, 0.08, 2.0),  # from half-time at the latest
)

BLOCK = 64  # of attention; the fastest measured for these rows on two CPU cores

Graph = nnx.GraphDef[qwen3.Qwen3]


def logits(graphdef: Graph, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """f32[B, N, V] for causal rows i32[B, N]."""
    rows, length = tokens.shape
    end = jnp.full((rows, length), length, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> tuple[jax.Array, None]:
        if length <= BLOCK:
            return attention.dense_tree_attention(q, k, v, end), None
        return tree_attention.tree_attention(q, k, v, end, BLOCK, BLOCK), None

    out = qwen3.apply(graphdef, params, tokens, positions, attend)
    return qwen3.apply_logits(graphdef, params, out.hidden)


def make_step(
    graphdef: Graph, tx: optax.GradientTransformation
) -> Callable[..., tuple[nnx.State, Any, dict[str, jax.Array]]]:
    """(params, opt_state, tokens i32[B, N+1], weights f32[B, N+1], lr factor) -> next, metrics."""

    def loss_fn(
        params: nnx.State, tokens: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = logits(graphdef, params, tokens[:, :-1])
        target, weight = tokens[:, 1:], weights[:, 1:]
        picked = jnp.take_along_axis(scores, target[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(scores, axis=-1) - picked
        sure = (weight > 0.99).astype(jnp.float32)
        hit = (picked >= jnp.max(scores, axis=-1)).astype(jnp.float32)
        metrics = {
            "sure_loss": jnp.sum(nll * sure) / jnp.maximum(jnp.sum(sure), 1),
            "sure_accuracy": jnp.sum(hit * sure) / jnp.maximum(jnp.sum(sure), 1),
        }
        loss = jnp.sum(nll * weight) / jnp.sum(weight)
        return loss, metrics | {"loss": loss}

    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=automatic)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), P()),
        check_vma=False,
    )
    def gradient(
        params: nnx.State, tokens: jax.Array, weights: jax.Array
    ) -> tuple[nnx.State, dict[str, jax.Array]]:
        """Mean over devices: each holds as many rows, of about the same weight."""
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, tokens, weights)
        return jax.lax.pmean(grads, "data"), jax.lax.pmean(metrics, "data")

    def step(
        params: nnx.State, opt_state: Any, tokens: jax.Array, weights: jax.Array, factor: jax.Array
    ) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
        grads, metrics = gradient(params, tokens, weights)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.tree.map(lambda u: u * factor, updates)
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1))


def make_predict(graphdef: Graph) -> Callable[[nnx.State, np.ndarray], jax.Array]:
    """(params, tokens i32[B, N]) -> greedy next tokens i32[B, N]."""
    return jax.jit(lambda params, tokens: jnp.argmax(logits(graphdef, params, tokens), axis=-1))


def save(path: pathlib.Path, state: Any, progress: dict[str, float]) -> None:
    """Writes all leaves and the counters of the run, atomically."""
    arrays: dict[str, Any] = {f"progress_{k}": np.float64(v) for k, v in progress.items()}
    arrays |= {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.replace(path)


def load(path: pathlib.Path, like: Any) -> tuple[Any, dict[str, float]]:
    """The state that `save` wrote, in the structure of `like`."""
    with np.load(path) as stored:
        leaves, structure = jax.tree.flatten(like)
        found = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(leaves))]
        progress = {
            k.removeprefix("progress_"): float(stored[k])
            for k in stored.files
            if k.startswith("progress_")
        }
    for have, want in zip(found, leaves, strict=True):
        if have.shape != want.shape:
            raise ValueError(f"{path}: expected a leaf of shape {want.shape}, got {have.shape}")
    return jax.tree.unflatten(structure, found), progress

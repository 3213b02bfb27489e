"""The jitted programs of training: scores of rows, gradients of a micro-step, the update.

One machine for policy and value model (`step`): what is scored and what is minimised are functions
that it is given. Gradients are sums over micro-steps, the weights W being fixed over the whole
batch beforehand, so any split into micro-steps gives the same update. Rows of every length have a
compilation each; a pass takes more of the shorter ones, so that it holds about as many tokens.
Arrays go to the device and come back where this file says so (a transfer guard is on).
Not here: batches (`batch`), objectives (`policy`, `critic`), several chips (`mesh`).
Invariant: one compilation per program and row length.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import CapacityError, TrainingError
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.train import mesh
from clawgym_jax.train.state import TrainState

Objective = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]  # (params, batch, load)
Score = Callable[..., tuple[Any, jax.Array | None]]  # (params, batch) -> (scores, overflow)
Metrics = dict[str, float]


class Step:
    """Programs compiled for one model, objective and optimiser."""

    def __init__(
        self,
        objective: Objective,
        score: Score,
        optimizer: optax.GradientTransformation,
        micro_rows: int = 1,
        row_tok: int | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """micro_rows: rows of `row_tok` tokens in one pass, of all chips together.

        Of shorter rows as many more as fit; row_tok None: micro_rows of every length.
        """
        self.micro_rows = micro_rows
        self._row_tok = row_tok
        self._parallel = parallel
        objective = functools.partial(objective, parallel=parallel)
        score = functools.partial(score, parallel=parallel)
        self._score: Any
        self._accumulate: Any
        if parallel is None:
            self._score = jax.jit(score)
            gradient = jax.value_and_grad(objective, has_aux=True)
            self._accumulate = jax.jit(
                functools.partial(_accumulate, gradient), donate_argnums=(1,)
            )
        else:
            mesh.check_rows(parallel, micro_rows)
            self._score = mesh.score(parallel, score)
            self._accumulate = mesh.accumulate(parallel, objective)
        apply = functools.partial(_apply, optimizer, parallel)
        self._apply = jax.jit(apply, donate_argnums=(0,))
        self._zeros = jax.jit(functools.partial(_zeros, parallel))

    def scores(self, params: Any, batch: TreeBatch) -> Any:
        """What `score` gives for all rows, on the host; leaves f32[R, ...]."""
        parts, overflows = [], []
        with guarded():
            for micro in self.micros(batch):
                scored, overflow = self._score(params, micro)
                parts.append(scored)
                overflows.append(overflow)
            host, rows = jax.device_get((parts, overflows))
        check_room(rows)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: batch.rows], *host)

    def update(
        self, state: TrainState, parts: Sequence[TreeBatch], load: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        """One optimiser step on a batch, given as rows of each length; `state` is consumed.

        Returns the sums of the objective over the batch, with "loss", the norms of gradient and
        update, and nothing divided.
        """
        with guarded():
            grads, losses, sums = self.gradients(state.params, parts, load)
            check_room([s.pop(mesh.OVERFLOW, None) for s in sums])  # before weights change
            state, norms = self._apply(state, grads)
            losses, norms = jax.device_get((losses, norms))
        check_numbers(norms)
        out = _added(sums) | {name: float(value) for name, value in norms.items()}
        return state, out | {"loss": float(sum(losses))}

    def gradients(
        self, params: Any, parts: Sequence[TreeBatch], load: jax.Array | None = None
    ) -> tuple[Any, list[jax.Array], list[dict[str, Any]]]:
        """The sum over all rows, the losses of the passes, their sums (on the host)."""
        grads = self._zeros(params)
        losses, sums = [], []
        for part in parts:
            for micro in self.micros(part):
                grads, value, added = self._accumulate(params, grads, micro, load)
                losses.append(value)
                sums.append(added)
        return grads, losses, jax.device_get(sums)

    def micros(self, batch: TreeBatch) -> Iterator[TreeBatch]:
        """The passes over a batch, on the device."""
        rows = self.micro_rows
        if self._row_tok is not None:
            rows *= max(1, self._row_tok // batch.tokens.shape[1])
        for micro in batch.micro(rows):
            if self._parallel is None:
                yield jax.device_put(micro)
            else:
                yield mesh.place_rows(self._parallel, micro)

    def lower(self, state: TrainState, batch: TreeBatch) -> dict[str, jax.stages.Lowered]:
        """The programs for a state and one pass's rows, arrays or only shapes, by name."""
        return {
            "score": self._score.lower(state.params, batch),
            "accumulate": self._accumulate.lower(state.params, state.params, batch, None),
            "apply": self._apply.lower(state, state.params),
        }


def guarded() -> contextlib.AbstractContextManager[None]:
    """Inside of it arrays move where the code says so, or it is an error."""
    return jax.transfer_guard("disallow")


def _accumulate(
    gradient: Any, params: Any, grads: Any, batch: TreeBatch, load: Any
) -> tuple[Any, Any, Any]:
    (value, sums), new = gradient(params, batch, load)
    return jax.tree.map(jnp.add, grads, new), value, sums


def _zeros(parallel: Parallel | None, params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros if parallel is None else mesh.keep_placed(parallel, zeros)


def _apply(
    optimizer: optax.GradientTransformation,
    parallel: Parallel | None,
    state: TrainState,
    grads: Any,
) -> tuple[TrainState, dict[str, jax.Array]]:
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
    new = TrainState(params, opt_state, state.updates + 1)
    return (new, norms) if parallel is None else mesh.keep_placed(parallel, (new, norms))


def check_room(overflows: Sequence[Any]) -> None:
    """Raises CapacityError if any expert's chip got more rows than it has room for."""
    rows = sum(int(count) for count in overflows if count is not None)
    if rows:
        raise CapacityError(
            f"{rows} rows of tokens found no room at their experts' chips, expected 0: routing is "
            "less even than mesh.expert_buffer allows; raise it. Nothing was updated."
        )


def check_numbers(norms: Mapping[str, Any]) -> None:
    """Raises TrainingError if an update was not finite: its weights must reach no checkpoint."""
    wrong = {name: float(value) for name, value in norms.items() if not np.isfinite(value)}
    if wrong:
        raise TrainingError(
            f"expected a finite gradient and update, got {wrong}: the weights are lost, the latest "
            "checkpoint is from before; look at advantages, values and log-probs of this step, or "
            "lower the learning rate"
        )


def _added(sums: Sequence[dict[str, Any]]) -> Metrics:
    """Over passes: sums, and extremes of what is named so."""
    out: Metrics = {}
    for name in sums[0] if sums else ():
        values = [float(s[name]) for s in sums]
        joined = max if name.endswith("_max") else min if name.endswith("_min") else sum
        out[name] = float(joined(values))
    return out

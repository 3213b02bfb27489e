"""The programs of training on a mesh: one chip's program under `shard_map`, the rest by sharding.

Forward and backward are written per chip (`model.parallel`), gradients taken inside: of the sum
over chips of their losses, which is why what the chips of a row hold alike counts 1/x each. The
optimiser's update is arithmetic on whole arrays that happen to be cut; XLA needs no help there.

A batch is on every host alike, as numpy; a chip is given its rows. Not here: the loss and the
update themselves (`step`), which array lies where (`model.sharding`).
Invariant: what comes out is placed by the same table as what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.sharding import FSDP, ROWS, X, shardings, specs

OVERFLOW = "expert_overflow_rows"  # among a loss's sums: rows that found no room at their expert
_EVERYWHERE = PartitionSpec()


def score(parallel: Parallel, one_chip: Callable[..., Any]) -> Callable[..., Any]:
    """(params, batch) -> (TokenLogprobs of all rows, overflow i32[]), on every chip alike."""

    def local(params: Any, batch: TreeBatch) -> tuple[Any, jax.Array]:
        scored, overflow = one_chip(params, batch)
        everyone = jax.lax.all_gather(scored, FSDP, tiled=True)
        return everyone, jax.lax.psum(overflow, (FSDP, X))

    def program(params: Any, batch: TreeBatch) -> Any:
        return _on_chips(local, parallel, (specs(params), ROWS), _EVERYWHERE)(params, batch)

    return jax.jit(program)


def accumulate(parallel: Parallel, one_chip: Callable[..., Any]) -> Callable[..., Any]:
    """(params, grads, batch, load) -> (grads plus this batch's, loss, its sums); grads go in."""
    chips_of_a_row = parallel.mesh.shape[X]

    def share(params: Any, batch: TreeBatch, load: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, sums = one_chip(params, batch, load)
        return value / chips_of_a_row, sums

    def local(params: Any, grads: Any, batch: TreeBatch, load: Any) -> tuple[Any, jax.Array, Any]:
        (value, sums), new = jax.value_and_grad(share, has_aux=True)(params, batch, load)
        new = jax.tree.map(_over_replicas, new, specs(params))
        overflow = jax.lax.psum(sums.pop(OVERFLOW), (FSDP, X))
        sums = {name: _over_rows(name, x) for name, x in sums.items()} | {OVERFLOW: overflow}
        return jax.tree.map(jnp.add, grads, new), jax.lax.psum(value, (FSDP, X)), sums

    def program(params: Any, grads: Any, batch: TreeBatch, load: Any) -> Any:
        place = specs(params)
        inside, out = (place, place, ROWS, _EVERYWHERE), (place, _EVERYWHERE, _EVERYWHERE)
        return _on_chips(local, parallel, inside, out)(params, grads, batch, load)

    return jax.jit(program, donate_argnums=(1,))


def total(parallel: Parallel, one_chip: Callable[..., Any]) -> Callable[..., Any]:
    """(params, batch) -> (sum over all rows, overflow i32[]), on every chip alike."""

    def local(params: Any, batch: TreeBatch) -> tuple[Any, jax.Array]:
        found, overflow = one_chip(params, batch)
        return jax.lax.psum(found, FSDP), jax.lax.psum(overflow, (FSDP, X))

    def program(params: Any, batch: TreeBatch) -> Any:
        return _on_chips(local, parallel, (specs(params), ROWS), _EVERYWHERE)(params, batch)

    return jax.jit(program)


def _over_rows(name: str, x: jax.Array) -> jax.Array:
    """A sum, or an extreme of what is named so, over the chips that hold other rows."""
    over = jax.lax.psum
    if name.endswith("_max"):
        over = jax.lax.pmax
    elif name.endswith("_min"):
        over = jax.lax.pmin
    joined: jax.Array = over(x, FSDP)
    return joined


def _over_replicas(grad: jax.Array, place: PartitionSpec) -> jax.Array:
    """Sums a shard's gradient over the axes on which its parameter is repeated."""
    cut = {name for part in place for name in ((part,) if isinstance(part, str) else part or ())}
    missing = tuple(axis for axis in (FSDP, X) if axis not in cut)
    return jax.lax.psum(grad, missing) if missing else grad


def _on_chips(
    local: Callable[..., Any], parallel: Parallel, inside: Any, outside: Any
) -> Callable[..., Any]:
    """`local` on every chip. Replication is not checked: Pallas kernels do not declare theirs."""
    return jax.shard_map(
        local, mesh=parallel.mesh, in_specs=inside, out_specs=outside, check_vma=False
    )


def keep_placed(parallel: Parallel, tree: Any) -> Any:
    """Inside a program: `tree` of parameters, moments and counters, placed by the table."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, parallel.mesh))


def place_rows(parallel: Parallel, batch: TreeBatch) -> TreeBatch:
    """The whole batch, the same on every host, with each chip given its rows."""
    rows = NamedSharding(parallel.mesh, ROWS)
    return jax.tree.map(lambda x: _put(x, rows), batch)  # type: ignore[no-any-return]


def everywhere(parallel: Parallel, x: Any) -> jax.Array:
    """A host array, the same on every host, whole on each chip."""
    return _put(x, NamedSharding(parallel.mesh, _EVERYWHERE))


def _put(x: Any, where: NamedSharding) -> jax.Array:
    host = np.asarray(x)
    with jax.transfer_guard_host_to_device("allow"):  # this is where arrays are meant to move
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def check_rows(parallel: Parallel, micro_rows: int) -> None:
    """Raises ConfigError unless the rows of a pass divide over the mesh."""
    over = parallel.mesh.shape[FSDP]
    if micro_rows % over:
        raise ConfigError(
            f"model.micro_rows: expected a multiple of mesh.fsdp={over}, got {micro_rows}"
        )

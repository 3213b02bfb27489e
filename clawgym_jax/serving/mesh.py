"""The engine's programs on the chips of one host: one chip's program under `shard_map`.

Keys and values are cut over `tensor` by their heads; everything else of the state is on every chip
alike, and so is what comes out. Without a mesh nothing here does anything but copy.
Not here: the programs (`engine`), a chip's share of a layer (`model.parallel_serving`).
Invariant: all chips draw the same tokens: they see the same logits and the same random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from clawgym_jax.model import sharding
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.sharding import SERVING, TENSOR, shardings, specs

_EVERYWHERE = PartitionSpec()
_HEADS = PartitionSpec(None, None, TENSOR)  # of f[L, S, KV, T, hd]
_PRECISE = ("norm", "router")  # ends of names of parameters that are used as they are


def on_chips(parallel: ServingParallel | None, one_chip: Callable[..., Any]) -> Callable[..., Any]:
    """(params, state, *rest) -> (state, result); static arguments in `rest` are passed on."""
    if parallel is None:
        return one_chip

    def program(params: Any, state: Any, *rest: Any) -> Any:
        arrays = [x for x in rest if not _static(x)]

        def local(params: Any, state: Any, *given: Any) -> Any:
            left = iter(given)
            return one_chip(params, state, *(x if _static(x) else next(left) for x in rest))

        place = _state_specs(state)
        return jax.shard_map(
            local,
            mesh=parallel.mesh,
            in_specs=(specs(params, SERVING), place, *(_EVERYWHERE for _ in arrays)),
            out_specs=(place, _EVERYWHERE),
            check_vma=False,
        )(params, state, *arrays)

    return program


def _static(argument: Any) -> bool:
    """Numbers and plain tuples of them; a NamedTuple holds arrays."""
    return type(argument) in (int, bool, tuple)


def platform(parallel: ServingParallel | None) -> str:
    """What the programs are compiled for."""
    device = jax.devices()[0] if parallel is None else parallel.mesh.devices.flat[0]
    return str(device.platform)


def loader(parallel: ServingParallel | None, dtype: DTypeLike) -> Callable[[Any], Any]:
    """params -> the serving copy: matrices in the type they are computed with, cut by the table."""
    copy = jax.jit(functools.partial(computed, dtype=dtype))
    if parallel is None:
        return copy
    return lambda params: jax.device_put(copy(params), shardings(params, parallel.mesh, SERVING))


def computed(params: Any, dtype: DTypeLike) -> Any:
    """A copy; what the model would cast at every use is cast once."""

    def one(path: Sequence[Any], leaf: jax.Array) -> jax.Array:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        keep = any(name.endswith(_PRECISE) for name in names)
        return leaf.copy() if keep else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def fresh(parallel: ServingParallel | None, empty: Callable[[], Any]) -> Any:
    """A decode state, each chip's share made there: one chip has no room for the whole."""
    if parallel is None:
        return empty()
    where = _state_shardings(parallel, jax.eval_shape(empty))
    return jax.jit(empty, out_shardings=where)()


def shaped(parallel: ServingParallel | None, params: Any, state: Any) -> tuple[Any, Any]:
    """Shapes of (params, state) that know their sharding, to compile without data."""
    if parallel is None:
        return params, state
    where = _state_shardings(parallel, state)
    return sharding.shaped(params, parallel.mesh, SERVING), jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        where,
    )


def _state_shardings(parallel: ServingParallel, state: Any) -> Any:
    return jax.tree.map(
        lambda part: NamedSharding(parallel.mesh, part),
        _state_specs(state),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _state_specs(state: Any) -> Any:
    """PartitionSpecs of a DecodeState (or a tree of its structure)."""
    everywhere = jax.tree.map(lambda _: _EVERYWHERE, state)
    heads = jax.tree.map(lambda _: _HEADS, state)
    cut = {name: getattr(heads, name) for name in ("k", "v", "pool_k", "pool_v")}
    return everywhere._replace(**cut)

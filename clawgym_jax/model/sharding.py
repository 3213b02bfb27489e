"""Which axis of which array lies over which axis of the mesh: the one table, and its readers.

Training uses a mesh (fsdp, x). Packed rows lie over `fsdp`; the chips of one row are `x`, which is
in turn the axis of its tokens, of attention heads, of experts and of the vocabulary:

    between layers   tokens      [rows/fsdp, tokens/x, hidden]
    attention        heads       [rows/fsdp, tokens, heads/x, head_dim]   (all-to-all, and back)
    experts          experts     [whatever the router sends to this chip's experts/x, hidden]
    output head      vocabulary  [rows/fsdp, slots, vocabulary/x]

One axis for four things, because no array needs two of them at a time: each chip has its share of
every kind of work, none repeats another's, and a step from one share to the next is one
collective. A tensor axis of its own would add an all-reduce of all activations to every layer,
while a row of 64K tokens keeps a chip busy far longer than gathering a layer's weights takes.

Weights (float32) and Adam's moments are cut over both axes; a layer gathers its weights in the
activations' type just before it uses them, all but the experts and the vocabulary, which stay cut
over x. Serving holds a whole model on the chips of one host, mesh (expert, tensor).

Invariant: a parameter without a row in `PARAMETERS` is an error, not a replica.
Not here: the collectives (`parallel`), the experts' exchange (`expert_parallel`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.config import Qwen3Config

FSDP, X = "fsdp", "x"  # axes of a training mesh
EXPERT, TENSOR = "expert", "tensor"  # axes of a serving mesh

PARAMETERS: Mapping[str, tuple[str, ...]] = {  # name: its logical axes
    "embed": ("vocabulary", "hidden"),
    "head": ("hidden", "vocabulary"),
    "norm": ("channel",),
    "value": ("channel",),  # the head of a value model
    "input_norm": ("layer", "channel"),
    "post_norm": ("layer", "channel"),
    "q_norm": ("layer", "channel"),
    "k_norm": ("layer", "channel"),
    "q": ("layer", "hidden", "heads"),
    "k": ("layer", "hidden", "kv_heads"),
    "v": ("layer", "hidden", "kv_heads"),
    "o": ("layer", "heads", "hidden"),
    "gate": ("layer", "hidden", "width"),
    "up": ("layer", "hidden", "width"),
    "down": ("layer", "width", "hidden"),
    "router": ("layer", "hidden", "scores"),
    "expert_gate": ("layer", "experts", "hidden", "expert_width"),
    "expert_up": ("layer", "experts", "hidden", "expert_width"),
    "expert_down": ("layer", "experts", "expert_width", "hidden"),
}
Rules = Mapping[str, tuple[str, ...]]  # logical axis: mesh axes; not named = whole on every chip
TRAINING: Rules = {
    "hidden": (FSDP,),
    "heads": (X,),
    "kv_heads": (X,),
    "width": (X,),
    "scores": (X,),
    "experts": (X,),
    "vocabulary": (X,),
}
KEPT = ("experts", "vocabulary")  # in training: still cut while a chip computes with them
SERVING: Rules = {
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),  # hence at most num_kv_heads chips
    "width": (TENSOR,),
    "experts": (EXPERT, TENSOR),
    "vocabulary": (EXPERT, TENSOR),
}
ROWS = PartitionSpec(FSDP)  # a batch: its rows over fsdp, each whole on the chips of x


def make_mesh(fsdp: int, x: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A training mesh over `devices` (default all), neighbours in x near each other."""
    return _mesh({FSDP: fsdp, X: x}, devices)


def make_serving_mesh(expert: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A serving mesh over `devices` (default those of this process)."""
    return _mesh({EXPERT: expert, TENSOR: tensor}, devices or jax.local_devices())


def _mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None) -> Mesh:
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(sizes.values())
    if min(shape) < 1 or int(np.prod(shape)) != len(devices):
        wanted = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"mesh: expected {wanted} to be the {len(devices)} devices there are")
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(sizes))


def spec(axes: Sequence[str], rules: Rules) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; whole, it is what jit writes: P()."""
    parts = [rules.get(axis, ()) for axis in axes]
    if not any(parts):
        return PartitionSpec()
    return PartitionSpec(*(p[0] if len(p) == 1 else (p or None) for p in parts))


def specs(tree: Any, rules: Rules = TRAINING) -> Any:
    """`tree` with a PartitionSpec for each leaf.

    Parameters, their gradients and their moments are found by name; counters are on every chip.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec(_axes_at(path, leaf.ndim), rules), tree
    )


def shardings(tree: Any, mesh: Mesh, rules: Rules = TRAINING) -> Any:
    """`tree` with a NamedSharding for each leaf."""
    return jax.tree.map(lambda part: NamedSharding(mesh, part), specs(tree, rules))


def shaped(tree: Any, mesh: Mesh, rules: Rules = TRAINING) -> Any:
    """`tree` of arrays or shapes as shapes that know their sharding, to compile without data."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        tree,
        shardings(tree, mesh, rules),
    )


def check(config: Qwen3Config, shapes: Any, mesh: Mesh, rules: Rules = TRAINING) -> None:
    """Raises ConfigError unless the mesh divides every parameter of `shapes`, and the heads."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        axes = _axes_at(path, leaf.ndim)
        for axis, size in zip(axes, leaf.shape, strict=True):
            parts = int(np.prod([mesh.shape[name] for name in rules.get(axis, ())]))
            if size % parts:
                raise ConfigError(
                    f"mesh: {jax.tree_util.keystr(path)} has {size} {axis}, expected a multiple "
                    f"of {' x '.join(rules[axis])} = {parts}: choose another mesh"
                )
    split = mesh.shape[rules["heads"][0]]
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % split or (kv_heads % split and (split % kv_heads or rules is SERVING)):
        raise ConfigError(
            f"mesh: {rules['heads'][0]}={split} does not divide the {heads} heads and {kv_heads} "
            "key-value heads evenly: choose another mesh"
        )


def _axes_at(path: Sequence[Any], ndim: int) -> tuple[str, ...]:
    """Logical axes of the leaf at a tree path; the last key with a row in the table names it."""
    if ndim == 0:
        return ()
    for key in reversed(path):
        name = str(getattr(key, "key", getattr(key, "name", "")))
        for row in (f"expert_{name}", name):
            if len(PARAMETERS.get(row, ())) == ndim:
                return PARAMETERS[row]
    raise ConfigError(
        f"sharding: no row for {jax.tree_util.keystr(tuple(path))} with {ndim} axes; "
        "add it to sharding.PARAMETERS"
    )

"""Qwen3 weights in Hugging Face's files: config.json and safetensors, read and written.

`read` goes straight from the mapped files to the devices: each device's slice of a parameter
(layers and experts stacked, linear weights [in, out]) is filled tensor by tensor and handed over,
so that host memory holds one parameter's local part at a time.  `write` is its inverse, one layer
of one parameter at a time; transformers loads what it wrote.

Invariant: `read(write(params))` gives the same arrays, bit for bit, however they are sharded.
Not here: downloading, names and shapes (`hf_names`), file formats (`hf_config`,
`safetensors_stream`), how to shard.
"""

import functools
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model import hf_config, hf_names, qwen3, safetensors_stream
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.hf_config import read_config as read_config
from clawgym_jax.model.safetensors_stream import CONFIG, INDEX, WEIGHTS

__all__ = ["CONFIG", "INDEX", "WEIGHTS", "check", "read", "read_config", "write"]

MAX_SHARD_BYTES = 5 * 10**9
_ALIGNMENT_BYTES = 64  # an aligned array becomes a CPU device's buffer without a copy
_KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT_FILES = (  # of a model folder, besides what is written here
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def read(
    folder: pathlib.Path | str,
    config: Qwen3Config | None = None,
    targets: Any = None,
) -> tuple[Qwen3Config, nnx.GraphDef[qwen3.Qwen3], nnx.State]:
    """(config, graphdef, params) of a model folder.

    `config` overrides dtypes (its shapes must be the folder's).  `targets` says where each
    parameter goes: a tree like `qwen3.abstract(config)[1]` whose leaves are shardings, or
    `jax.ShapeDtypeStruct`s with a sharding and the dtype wanted.  By default everything goes to
    the default device in `config.param_dtype`.  In a multi-process run each process reads only
    what its own devices hold.
    """
    folder = pathlib.Path(folder)
    if config is None:
        config = read_config(folder)
    graphdef, params = qwen3.abstract(config)
    stacks = hf_names.stacks(config)
    wanted = _targets(params, targets)
    check(folder, config)
    with safetensors_stream.Reader(folder) as tensors:
        for (path, variable), target in zip(nnx.to_flat_state(params), wanted, strict=True):
            variable.set_value(_load(tensors, stacks[path], target))
    return config, graphdef, params


def check(folder: pathlib.Path | str, config: Qwen3Config) -> None:
    """Raises ModelError unless a folder has the tensors of `config`; reads the files' headers."""
    with safetensors_stream.Reader(pathlib.Path(folder)) as tensors:
        shapes = {name: spec.shape for name, spec in tensors.specs.items()}
    hf_names.check(shapes, config, str(folder))


def write(
    folder: pathlib.Path | str,
    config: Qwen3Config,
    params: nnx.State,
    dtype: DTypeLike | None = None,
    like: pathlib.Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that `read` and transformers read: config.json and safetensors files.

    `dtype` is that of the files, by default the parameters' own.  `like` is the folder the model
    came from: its tokenizer and generation settings are taken over.  Where parameters span
    processes, every process must call this; process 0 writes, and all return when it has.
    """
    folder = pathlib.Path(folder)
    flat = dict(nnx.to_flat_state(params))
    stacks = hf_names.stacks(config)
    _check_params(flat, stacks)
    dtype = jnp.dtype(dtype or flat["embed",].dtype)
    rows = list(hf_names.in_file_order(stacks))
    arrays = _arrays(flat, stacks, rows, dtype)
    spread = any(not leaf.is_fully_addressable for leaf in _jax_leaves(params))
    if spread and jax.process_index() != 0:
        for _ in arrays:  # takes part in gathering each
            pass
    else:
        specs = [
            safetensors_stream.Spec(name, dtype, stacks[row.path].theirs)
            for row in rows
            for name in row.names
        ]
        texts = {CONFIG: _config_text(config.replace(param_dtype=dtype), like)}
        folder.mkdir(parents=True, exist_ok=True)
        if like is not None:
            _copy_kept(pathlib.Path(like), folder)
        safetensors_stream.write_folder(folder, specs, arrays, texts, max_shard_bytes)
    if spread:
        multihost_utils.sync_global_devices("hf_weights.write")


def _targets(params: nnx.State, targets: Any) -> list[jax.ShapeDtypeStruct]:
    """One per parameter, in the order of the flat state."""
    leaves = jax.tree.leaves(params)
    if targets is None:
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    expected: Any = jax.tree.structure(params)
    got: Any = jax.tree.structure(targets)
    if expected != got:
        raise ValueError(f"targets: expected a tree like the parameters, {expected}, got {got}")
    out = []
    for leaf, target in zip(leaves, jax.tree.leaves(targets), strict=True):
        if isinstance(target, Sharding):
            target = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        if target.shape != leaf.shape:
            raise ValueError(f"targets: expected shape {leaf.shape}, got {target.shape}")
        out.append(target)
    return out


def _load(
    tensors: safetensors_stream.Reader, stack: hf_names.Stack, target: jax.ShapeDtypeStruct
) -> jax.Array:
    dtype = np.dtype(target.dtype)
    if target.sharding is None:
        whole = tuple(slice(None) for _ in stack.shape)
        array: jax.Array = jax.device_put(_fill(tensors, stack, whole, dtype))
        return array
    filled: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}  # replicas are read once

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple(s.indices(size) for s, size in zip(index, stack.shape, strict=True))
        if key not in filled:
            filled[key] = _fill(tensors, stack, index, dtype)
        return filled[key]

    return jax.make_array_from_callback(stack.shape, target.sharding, part, dtype=dtype)


def _fill(
    tensors: safetensors_stream.Reader,
    stack: hf_names.Stack,
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """One slice of our parameter, from as many of their tensors as it touches."""
    ranges = [range(*s.indices(size)) for s, size in zip(index, stack.shape, strict=True)]
    out = _empty(tuple(len(r) for r in ranges), dtype)
    depth = len(stack.lead)
    inner = index[depth:][::-1] if stack.transposed else index[depth:]
    for place in np.ndindex(out.shape[:depth]):
        number = 0
        for r, i, size in zip(ranges, place, stack.lead, strict=False):
            number = number * size + r[i]
        tensors.copy(stack.names[number], inner, out[place], stack.transposed)
    return out


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like np.empty, aligned so that a CPU device takes it over instead of copying it."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _check_params(flat: dict[Any, Any], stacks: dict[hf_names.Path, hf_names.Stack]) -> None:
    expected = {path: stack.shape for path, stack in stacks.items()}
    got = {path: tuple(variable.shape) for path, variable in flat.items()}
    wrong = {
        p: (expected.get(p), got.get(p)) for p in expected | got if expected.get(p) != got.get(p)
    }
    if wrong:
        lines = "\n  ".join(
            f"{'/'.join(map(str, path))}: expected {want}, got {have}"
            for path, (want, have) in wrong.items()
        )
        raise ModelError(f"these are not the parameters of this configuration:\n  {lines}")


def _arrays(
    flat: dict[Any, Any],
    stacks: dict[hf_names.Path, hf_names.Stack],
    rows: list[hf_names.Rows],
    dtype: np.dtype,
) -> Iterator[np.ndarray]:
    """Their tensors in the order of `rows`, each made when it is asked for."""
    for row in rows:
        stack = stacks[row.path]
        block = _fetch(flat[row.path][...], row.layer, dtype)
        for tensor in block if len(stack.lead) == 2 else (block,):
            yield tensor.T if stack.transposed else tensor


def _fetch(param: jax.Array | np.ndarray, row: int | None, dtype: np.dtype) -> np.ndarray:
    """A row of a parameter (None: all of it) on this host, wherever it lies."""
    if isinstance(param, np.ndarray):
        return (param if row is None else param[row]).astype(dtype, copy=False)
    sharding, whole = param.sharding, None
    if isinstance(sharding, NamedSharding):
        # The same buffers on a mesh whose axes are the compiler's to use: a row may be cut anyhow.
        names = sharding.mesh.axis_names
        mesh = Mesh(sharding.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        shards = [shard.data for shard in param.addressable_shards]
        place = NamedSharding(mesh, sharding.spec)
        param = jax.make_array_from_single_device_arrays(param.shape, place, shards)
        whole = None if param.is_fully_addressable else NamedSharding(mesh, PartitionSpec())
    elif not param.is_fully_addressable:
        raise ValueError(f"expected a NamedSharding across processes, got {sharding}")
    return np.asarray(_taker(row is None, dtype, whole)(param, row or 0))


@functools.cache
def _taker(everything: bool, dtype: np.dtype, whole: Sharding | None) -> Any:
    """One program per shape, whatever the row."""

    def take(x: jax.Array, row: jax.Array) -> jax.Array:
        part = x if everything else jax.lax.dynamic_index_in_dim(x, row, keepdims=False)
        return part.astype(dtype)

    return jax.jit(take, out_shardings=whole)


def _jax_leaves(params: nnx.State) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]


def _config_text(config: Qwen3Config, like: pathlib.Path | str | None) -> str:
    kept: dict[str, Any] = {}
    if like is not None:
        old = json.loads((pathlib.Path(like) / CONFIG).read_text(encoding="utf-8"))
        kept = {key: old[key] for key in _KEPT_KEYS if key in old}
    return json.dumps(hf_config.to_hf(config) | kept, indent=2) + "\n"


def _copy_kept(source: pathlib.Path, folder: pathlib.Path) -> None:
    for name in _KEPT_FILES:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)

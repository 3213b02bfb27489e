"""Qwen3 weights in Hugging Face's files: config.json and safetensors, read and written.

`read` maps tensor names to our parameter tree (linear weights transposed to [in, out], layers
and experts stacked); `write` is its inverse, so that transformers loads what we trained.

Invariant: `read(write(params))` gives the same arrays, bit for bit.
Not here: downloading, sharded placement (give `read` a `place` function), tokenizers.
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from clawgym_jax.model import config as model_config
from clawgym_jax.model import qwen3

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Our name of a layer's parameter: theirs, and whether theirs is transposed.
_LAYER = {
    "input_norm": ("input_layernorm", False),
    "q": ("self_attn.q_proj", True),
    "k": ("self_attn.k_proj", True),
    "v": ("self_attn.v_proj", True),
    "o": ("self_attn.o_proj", True),
    "q_norm": ("self_attn.q_norm", False),
    "k_norm": ("self_attn.k_norm", False),
    "post_norm": ("post_attention_layernorm", False),
}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def read(
    folder: pathlib.Path | str,
    config: model_config.Qwen3Config | None = None,
    place: Callable[[str, np.ndarray], jax.Array] | None = None,
) -> tuple[model_config.Qwen3Config, nnx.GraphDef[qwen3.Qwen3], nnx.State]:
    """(config, graphdef, params) of a model folder.

    `config` overrides dtypes (its shapes must be the folder's); `place(path, array)` puts one
    parameter on devices, by default `jax.numpy.asarray`.
    """
    folder = pathlib.Path(folder)
    if config is None:
        config = read_config(folder)
    graphdef, params = qwen3.abstract(config)
    with _Tensors(folder) as tensors:
        for path, variable in nnx.to_flat_state(params):
            name = "/".join(str(p) for p in path)
            array = _assemble(tensors, path, config)
            if array.shape != variable.shape:
                raise ValueError(
                    f"{folder}: {name}: expected shape {variable.shape}, got {array.shape}: "
                    "do config.json and the weights belong together?"
                )
            array = array.astype(variable.dtype)
            variable.set_value(place(name, array) if place else jax.numpy.asarray(array))
    return config, graphdef, params


def read_config(folder: pathlib.Path | str) -> model_config.Qwen3Config:
    """The configuration in `folder`'s config.json."""
    path = pathlib.Path(folder) / "config.json"
    return model_config.from_hf(json.loads(path.read_text(encoding="utf-8")))


def write(folder: pathlib.Path | str, config: model_config.Qwen3Config, params: nnx.State) -> None:
    """Writes config.json and one safetensors file that transformers reads."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(params):
        array = np.asarray(variable[...])
        for name, part in _disassemble(path, array, config):
            tensors[name] = np.ascontiguousarray(part)
    safetensors.numpy.save_file(
        dict(sorted(tensors.items())), str(folder / WEIGHTS), metadata={"format": "pt"}
    )
    (folder / WEIGHTS).chmod(0o644)
    text = json.dumps(model_config.to_hf(config), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


class _Tensors:
    """Lazy access by name to the tensors of a folder, in one file or several."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        self._where: Mapping[str, str] = {}
        if index.exists():
            self._where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif not (folder / WEIGHTS).exists():
            raise FileNotFoundError(
                f"{folder}: expected {WEIGHTS} or {INDEX}; found "
                f"{sorted(p.name for p in folder.glob('*'))[:20]}"
            )

    def __enter__(self) -> "_Tensors":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._where.get(name, WEIGHTS)
        if file not in self._files:
            opened = safetensors.safe_open(str(self._folder / file), framework="flax")
            self._files[file] = opened.__enter__()
        try:
            return np.asarray(self._files[file].get_tensor(name))
        except safetensors.SafetensorError as error:
            raise KeyError(f"{self._folder / file}: no tensor {name!r}: {error}") from error


def _assemble(
    tensors: _Tensors, path: tuple[Any, ...], config: model_config.Qwen3Config
) -> np.ndarray:
    """Our array of one parameter, from however many of theirs."""
    if path[0] != "segments":
        name, transposed = _top(path[0])
        array = tensors[name]
        return array.T if transposed else array
    layers = _layers(config, path[1])
    return np.stack([_assemble_layer(tensors, layer, path[2], config) for layer in layers])


def _assemble_layer(
    tensors: _Tensors, layer: int, ours: str, config: model_config.Qwen3Config
) -> np.ndarray:
    prefix = f"model.layers.{layer}."
    if ours in _LAYER:
        theirs, transposed = _LAYER[ours]
        array = tensors[f"{prefix}{theirs}.weight"]
        return array.T if transposed else array
    if ours == "router":
        return tensors[f"{prefix}mlp.gate.weight"].T
    if not config.is_moe(layer):
        return tensors[f"{prefix}mlp.{_MLP[ours]}.weight"].T
    return np.stack(
        [
            tensors[f"{prefix}mlp.experts.{e}.{_MLP[ours]}.weight"].T
            for e in range(config.num_experts)
        ]
    )


def _disassemble(
    path: tuple[Any, ...], array: np.ndarray, config: model_config.Qwen3Config
) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and arrays for one parameter of ours."""
    if path[0] != "segments":
        name, transposed = _top(path[0])
        yield name, array.T if transposed else array
        return
    for layer, part in zip(_layers(config, path[1]), array, strict=True):
        prefix, ours = f"model.layers.{layer}.", path[2]
        if ours in _LAYER:
            theirs, transposed = _LAYER[ours]
            yield f"{prefix}{theirs}.weight", part.T if transposed else part
        elif ours == "router":
            yield f"{prefix}mlp.gate.weight", part.T
        elif not config.is_moe(layer):
            yield f"{prefix}mlp.{_MLP[ours]}.weight", part.T
        else:
            for e in range(config.num_experts):
                yield f"{prefix}mlp.experts.{e}.{_MLP[ours]}.weight", part[e].T


def _top(ours: str) -> tuple[str, bool]:
    """Name and transposition of a parameter that is not a layer's."""
    return {
        "embed": ("model.embed_tokens.weight", False),
        "norm": ("model.norm.weight", False),
        "head": ("lm_head.weight", True),
    }[ours]


def _layers(config: model_config.Qwen3Config, segment: int) -> range:
    """Layer numbers of one segment."""
    counts = [count for _, count in config.segments]
    start = sum(counts[:segment])
    return range(start, start + counts[segment])

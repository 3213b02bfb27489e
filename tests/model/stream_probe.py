"""Reads or writes a model folder as a program of its own, and prints the memory that took.

    python -m tests.model.stream_probe write FOLDER
    python -m tests.model.stream_probe read FOLDER --dtype=float32 --devices=8

One JSON line: how far the resident set rose above what it was before, against the bytes of the
model in memory and of its largest stack row (what is in flight).  A process of its own, because
the peak of a test runner says nothing, and because the number of devices is fixed at the start.
"""

import argparse
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_weights, qwen3

CONFIG = model_config.TINY.replace(  # 262 MB in float32
    vocab_size=16384,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=384,
    rope_theta=1e4,
)
SPECS = {  # by number of axes; every axis of a linear weight is cut somewhere
    1: PartitionSpec(),
    2: PartitionSpec("x", "fsdp"),
    3: PartitionSpec(None, "fsdp", "x"),
    4: PartitionSpec(None, "x", None, "fsdp"),
}


class Peak:
    """Resident bytes above those at the start."""

    def __init__(self) -> None:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._start = self._read("VmRSS")

    def rise(self) -> int:
        return self._read("VmHWM") - self._start

    def _read(self, key: str) -> int:
        status = pathlib.Path("/proc/self/status").read_text()
        found = re.search(rf"{key}:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) << 10


def write(folder: pathlib.Path) -> dict[str, int]:
    _, shapes = qwen3.abstract(CONFIG)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape, np.float32)), shapes)
    hf_weights.write(folder, CONFIG, params, max_shard_bytes=60 << 20)  # compiles
    peak = Peak()
    hf_weights.write(folder, CONFIG, params, max_shard_bytes=60 << 20)
    return report(peak, params)


def read(folder: pathlib.Path, dtype: str) -> dict[str, int]:
    config = hf_weights.read_config(folder).replace(param_dtype=jnp.dtype(dtype))
    _, shapes = qwen3.abstract(config)
    targets = None
    if jax.device_count() > 1:
        mesh = jax.make_mesh((2, jax.device_count() // 2), ("fsdp", "x"))
        targets = jax.tree.map(lambda x: NamedSharding(mesh, spec(x.shape, mesh)), shapes)
    jax.block_until_ready(jnp.ones(3) + 1)  # the backend is up
    peak = Peak()
    _, _, params = hf_weights.read(folder, config, targets)
    jax.block_until_ready(params)
    out = report(peak, params)
    if targets is not None and dtype == "float32":
        compare(folder, config, params, targets)
    return out


def spec(shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """A cut of every axis that divides; norms stay whole."""
    wanted = SPECS[len(shape)]
    fits = all(n % mesh.shape[a] == 0 for n, a in zip(shape, wanted, strict=False) if a)
    return wanted if fits else PartitionSpec()


def compare(folder: pathlib.Path, config: Any, params: nnx.State, targets: Any) -> None:
    """Cut parameters are the whole ones, are written to the same bytes, and may be donated."""
    _, _, plain = hf_weights.read(folder, config)
    leaves = (jax.tree.leaves(tree) for tree in (plain, params, targets))
    for whole, cut, place in zip(*leaves, strict=True):
        assert cut.sharding.is_equivalent_to(place, cut.ndim) and cut.dtype == whole.dtype
        np.testing.assert_array_equal(np.asarray(cut), np.asarray(whole))
    for name, tree in (("cut", params), ("whole", plain)):
        hf_weights.write(folder / name, config, tree)
    for file in (hf_weights.WEIGHTS, hf_weights.CONFIG):
        assert (folder / "cut" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    twice = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(params)
    for whole, doubled in zip(jax.tree.leaves(plain), jax.tree.leaves(twice), strict=True):
        np.testing.assert_array_equal(np.asarray(doubled), 2 * np.asarray(whole))


def report(peak: Peak, params: nnx.State) -> dict[str, int]:
    rise = peak.rise()
    total, largest = 0, 0
    for path, leaf in nnx.to_flat_state(params):
        size = leaf[...].nbytes
        total += size
        largest = max(largest, size // leaf.shape[0] if path[0] == "segments" else size)
    return {"rise_bytes": rise, "total_bytes": total, "row_bytes": largest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["write", "read"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--devices", type=int, default=1)
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.devices)
    out = write(flags.folder) if flags.mode == "write" else read(flags.folder, flags.dtype)
    print(json.dumps(out))


if __name__ == "__main__":
    main()

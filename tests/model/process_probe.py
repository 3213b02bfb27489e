"""One of two processes that hold one model between them: each reads its part, both write it.

    python -m tests.model.process_probe ADDRESS RANK FOLDER OUT

Every parameter is cut over both processes; the files written must be those that were read.
"""

import pathlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clawgym_jax.model import hf_weights, qwen3

AXES = {  # the axis that is cut, by number of axes: vocabulary, width, width, experts
    1: PartitionSpec("host"),
    2: PartitionSpec("host", "chip"),
    3: PartitionSpec(None, "chip", "host"),
    4: PartitionSpec(None, "host", "chip"),
}


def main() -> None:
    address, rank, folder, out = sys.argv[1], int(sys.argv[2]), *map(pathlib.Path, sys.argv[3:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = jax.make_mesh((2, 2), ("host", "chip"))
    config = hf_weights.read_config(folder)
    _, shapes = qwen3.abstract(config)
    targets = jax.tree.map(
        lambda x: NamedSharding(mesh, AXES[x.ndim] if x.shape[0] % 2 == 0 else PartitionSpec()),
        shapes,
    )
    _, _, params = hf_weights.read(folder, config, targets)
    _, _, whole = hf_weights.read(folder, config)
    for cut, full in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert not cut.is_fully_addressable
        for shard in cut.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(full)[shard.index])
    hf_weights.write(out, config, params, max_shard_bytes=20_000)
    assert (out / hf_weights.CONFIG).exists(), "expected to return when all is written"
    if rank == 0:
        names = sorted(path.name for path in folder.iterdir())
        assert sorted(path.name for path in out.iterdir()) == names
        for name in names:
            assert (out / name).read_bytes() == (folder / name).read_bytes(), name


if __name__ == "__main__":
    main()

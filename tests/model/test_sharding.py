"""The table: every parameter has a row, every chip its share, and a wrong mesh is refused."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model import config as model_config
from clawgym_jax.model import qwen3, sharding
from clawgym_jax.train.state import OptimConfig, init_state, make_optimizer

POD = AbstractMesh((8, 8), (sharding.FSDP, sharding.X))
HOST = AbstractMesh((2, 4), (sharding.EXPERT, sharding.TENSOR))


def bytes_per_chip(tree: Any, mesh: Any, rules: sharding.Rules) -> int:
    leaves = zip(jax.tree.leaves(tree), _specs(tree, rules), strict=True)
    return sum(
        int(np.prod(NamedSharding(mesh, part).shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, part in leaves
    )


def _specs(tree: Any, rules: sharding.Rules) -> list[PartitionSpec]:
    return jax.tree.leaves(
        sharding.specs(tree, rules), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


@pytest.mark.parametrize("name", ["QWEN3_30B_A3B", "QWEN3_8B"])
def test_a_chip_of_64_trains_a_64th(name: str) -> None:
    """Weights and Adam's moments, 12 bytes a parameter, lie over all chips."""
    config = getattr(model_config, name).replace(param_dtype=np.dtype("float32"))
    _, params = qwen3.abstract(config)
    sharding.check(config, params, POD)
    state = jax.eval_shape(lambda p: init_state(p, make_optimizer(OptimConfig())), params)
    whole = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    each = bytes_per_chip(state, POD, sharding.TRAINING)
    assert each < whole / 64 * 1.003  # norms and counters are on every chip


def test_a_host_of_8_serves_an_8th() -> None:
    config = model_config.QWEN3_30B_A3B
    _, params = qwen3.abstract(config)
    sharding.check(config, params, HOST, sharding.SERVING)
    whole = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert bytes_per_chip(params, HOST, sharding.SERVING) < whole / 8 * 1.1  # routers are whole


def test_moments_lie_where_their_parameters_do() -> None:
    _, params = qwen3.abstract(model_config.TINY)
    state = jax.eval_shape(lambda p: init_state(p, make_optimizer(OptimConfig())), params)
    found = sharding.specs(state)
    adam = found.opt_state[1][0]
    for moments in (adam.mu, adam.nu):
        assert _leaves(moments) == _leaves(found.params)
    assert adam.count == found.updates == PartitionSpec()
    experts = found.params["segments"][0]["gate"].get_value()
    assert experts == PartitionSpec(None, "x", "fsdp", None)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


@pytest.mark.parametrize(
    ("fsdp", "x", "said"),
    [(1, 3, "expected a multiple"), (5, 1, "hidden"), (1, 16, "does not divide|multiple")],
)
def test_a_mesh_that_does_not_divide_is_refused(fsdp: int, x: int, said: str) -> None:
    _, params = qwen3.abstract(model_config.TINY)
    with pytest.raises(ConfigError, match=said):
        sharding.check(model_config.TINY, params, AbstractMesh((fsdp, x), ("fsdp", "x")))


def test_key_value_heads_bound_the_chips_that_serve() -> None:
    config = model_config.QWEN3_30B_A3B
    _, params = qwen3.abstract(config)
    eight = AbstractMesh((1, 8), (sharding.EXPERT, sharding.TENSOR))
    with pytest.raises(ConfigError, match="4 key-value heads"):
        sharding.check(config, params, eight, sharding.SERVING)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no row for .*surprise"):
        sharding.specs({"surprise": jax.ShapeDtypeStruct((4, 4), np.float32)})
    with pytest.raises(ConfigError, match="no row"):  # a known name with other axes
        sharding.specs({"embed": jax.ShapeDtypeStruct((4,), np.float32)})


def test_a_mesh_uses_every_device() -> None:
    with pytest.raises(ConfigError, match="fsdp=2 x x=3"):
        sharding.make_mesh(2, 3, jax.devices()[:1])
    assert dict(sharding.make_mesh(1, 1, jax.devices()[:1]).shape) == {"fsdp": 1, "x": 1}

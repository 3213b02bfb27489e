"""Counting what the real TPU compiler writes: products, loops, collectives, kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from clawgym_jax.compiled.dump import CompileError, compile_and_read
from clawgym_jax.compiled.findings import examine
from clawgym_jax.compiled.flops import count_flops
from clawgym_jax.compiled.memory import largest_buffers
from clawgym_jax.compiled.topology import devices_of
from clawgym_jax.compiled.traffic import transfers
from tests.conftest import require

CHIP_KINDS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")


@pytest.fixture(autouse=True)
def compiler() -> None:
    present = importlib.util.find_spec("libtpu") is not None
    require(present, "libtpu is not installed: pip install -e '.[test]' brings it")


@pytest.mark.parametrize("topology", CHIP_KINDS)
def test_products_loops_and_collectives_of_a_sharded_program(topology: str, tmp_path: Path) -> None:
    """Tokens over 2, hidden over 4: a scan of matrix products whose result is gathered."""
    mesh = Mesh(np.array(devices_of(topology)).reshape(2, 4), ("data", "model"))
    layers, tokens, width = 6, 512, 1024

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            hidden = jnp.tanh(carry @ weight)  # columns over "model"
            return jax.lax.with_sharding_constraint(hidden, rows), None

        return jax.lax.scan(layer, x, w)[0]

    rows = NamedSharding(mesh, PartitionSpec("data", None))
    shapes = [
        _shape((layers, width, width), mesh, None, None, "model"),
        _shape((tokens, width), mesh, "data", None),
    ]
    lowered = jax.jit(program).lower(*shapes)
    _, module = compile_and_read("program", lowered, tmp_path)
    whole = layers * 2 * tokens * width * width
    assert count_flops(module).total == whole // 8
    found = transfers(module, devices=8)
    gathered = sum(t.bytes for t in found if t.kind == "all-gather")
    # Each device lacks three quarters of the columns of its rows, in every layer.
    assert gathered == layers * (tokens // 2) * (width * 3 // 4) * 2
    assert largest_buffers(tmp_path)[0].bytes == layers * width * width // 4 * 2


@pytest.mark.parametrize("topology", CHIP_KINDS)
def test_batched_products_are_counted_once(topology: str, tmp_path: Path) -> None:
    mesh = Mesh(np.array(devices_of(topology))[:1], ("x",))
    shapes = [_shape((16, 256, 128), mesh), _shape((16, 128, 384), mesh)]

    def program(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", a, b)

    lowered = jax.jit(program).lower(*shapes)
    _, module = compile_and_read("program", lowered, tmp_path)
    assert count_flops(module).total == 2 * 16 * 256 * 128 * 384


def test_what_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    mesh = Mesh(np.array(devices_of("v5e:2x4"))[:1], ("x",))
    wide = 70_000  # twice 9.8 GB of bfloat16, on a chip of 16

    def program(a: jax.Array) -> jax.Array:
        return jnp.sort(a, axis=0) @ jnp.sort(a, axis=1)

    lowered = jax.jit(program).lower(_shape((wide, wide), mesh))
    with pytest.raises(CompileError, match=r"big does not compile: .* exceeds .*remat"):
        examine("big", lowered, 1, tmp_path, {})


def _shape(dims: tuple[int, ...], mesh: Mesh, *axes: str | None) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)

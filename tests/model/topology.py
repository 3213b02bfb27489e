"""The real TPU compiler, for chips that nobody here has: skips, or fails under REQUIRE_ALL=1."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from tests.conftest import require

CHIPS = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v5e": "v5e:2x2"}  # smallest topology of each


def chips(kind: str) -> np.ndarray:
    """The devices, object[n], of the smallest topology of a kind: "v5p", "v6e" or "v5e"."""
    present = importlib.util.find_spec("libtpu") is not None
    require(present, "libtpu is not installed: pip install -e '.[test]' brings it")
    return _devices(CHIPS[kind])


@functools.cache
def _devices(topology: str) -> np.ndarray:
    # No metadata server to ask, and other test processes may hold the library's lock.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    return np.asarray(described.devices)


def compile_for_chip(
    kind: str, function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct
) -> jax.stages.Compiled:
    """`function` compiled for one chip of a kind."""
    device = jax.sharding.SingleDeviceSharding(chips(kind)[0])
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device) for s in shapes]
    return jax.jit(function).lower(*placed).compile()

"""Devices of a TPU topology that is not here: enough to compile for it.

The compiler (package libtpu) runs on any CPU host. Invariant: nothing is run on these devices.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from clawgym_jax.compiled.chips import chip_of
from clawgym_jax.core.errors import ConfigError


@functools.cache
def devices_of(topology: str) -> Sequence[Any]:
    """The devices of "v5p:4x4x4", "v6e:8x8", "v5e:16x16", ... in the topology's own order."""
    chip_of(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "the TPU compiler is not installed: pip install -e '.[tpu]' (make test does)"
        )
    # No metadata server to ask, and another process may hold the library's lock.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # whatever the compiler library raises for a shape it does not know
        raise ConfigError(
            f"--topology={topology}: the compiler knows no such topology: {error}"
        ) from error

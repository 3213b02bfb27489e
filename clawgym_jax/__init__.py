"""Train language-model agents through the harness they will be deployed in."""

import os as _os
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

__version__ = "0.1.0"


def _without_a_tpu() -> bool:
    """Whether the TPU compiler is installed (to compile for chips elsewhere) and no TPU is here."""
    if _find_spec("libtpu") is None or _find_spec("jax_cuda12_plugin") is not None:
        return False
    return not any(_Path("/dev").glob("accel*")) and not any(_Path("/dev/vfio").glob("[0-9]*"))


if _without_a_tpu():  # else jax looks for one first, which takes seconds and prints alarms
    _os.environ.setdefault("JAX_PLATFORMS", "cpu")

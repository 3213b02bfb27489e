"""The committed fixtures as model folders, their reference logits, and ours."""

import contextlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from clawgym_jax.model import attention, hf_names, hf_weights, qwen3
from clawgym_jax.model.config import Qwen3Config

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CASES: dict[str, Any] = json.loads((FIXTURES / "configs.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5  # of float32 logits, which are between -6 and 6


def folder_of(tmp_path: pathlib.Path, case: str, **changes: Any) -> pathlib.Path:
    """A model folder of the fixtures' weights, with the case's configuration."""
    weights = FIXTURES / f"{CASES[case]['weights']}.safetensors"
    return make_folder(tmp_path, weights.read_bytes(), CASES[case]["config"] | changes)


def folder_with_all_tensors(tmp_path: pathlib.Path, case: str, **changes: Any) -> pathlib.Path:
    """Like `folder_of`, of weights that also have what the case itself has no use for.

    Every layer has experts and a dense MLP, so that a change of which layers are what finds
    weights.
    """
    tensors: dict[str, np.ndarray] = {}
    for weights in ("dense", "moe", CASES[case]["weights"]):
        tensors |= safetensors.numpy.load_file(FIXTURES / f"{weights}.safetensors")
    folder = make_folder(tmp_path, b"", CASES[case]["config"] | changes)
    stacks = hf_names.stacks(hf_weights.read_config(folder)).values()
    wanted = {name: tensors[name] for stack in stacks for name in stack.names}
    safetensors.numpy.save_file(wanted, folder / hf_weights.WEIGHTS)
    return folder


def make_folder(tmp_path: pathlib.Path, weights: bytes, config: Any) -> pathlib.Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / hf_weights.WEIGHTS).write_bytes(weights)
    (folder / hf_weights.CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def reference(name: str) -> np.ndarray:
    """What transformers gave: `tokens`, `<case>` or `<case>.bf16`, the last as float32."""
    with safetensors.safe_open(FIXTURES / "logits.safetensors", framework="flax") as file:
        array = np.asarray(file.get_tensor(name))
    return array.astype(np.float32) if name.endswith(".bf16") else array


def logits_of(
    folder: pathlib.Path, config: Qwen3Config | None = None, compiled: bool = True
) -> np.ndarray:
    """f32[B, N, V] of the reference's tokens; uncompiled saves a second per configuration."""
    _, graphdef, params = hf_weights.read(folder, config)
    tokens = jnp.asarray(reference("tokens"))
    with contextlib.nullcontext() if compiled else jax.disable_jit():
        return np.asarray(jax.jit(forward, static_argnums=0)(graphdef, params, tokens))


def forward(graphdef: nnx.GraphDef[qwen3.Qwen3], params: nnx.State, tokens: jax.Array) -> jax.Array:
    """f32[B, N, V] for causal rows i32[B, N]."""
    end = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return attention.dense_tree_attention(q, k, v, end), None

    out = qwen3.apply(graphdef, params, tokens, positions, attend)
    return qwen3.apply_logits(graphdef, params, out.hidden)

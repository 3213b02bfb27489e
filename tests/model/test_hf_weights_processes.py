"""A model that no single process holds is read and written by two, each with its own part."""

import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_weights, qwen3

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_two_processes_read_and_write_one_model(tmp_path: pathlib.Path) -> None:
    config = model_config.TINY.replace(
        vocab_size=64, hidden_size=32, num_layers=2, tie_word_embeddings=False
    )
    _, shapes = qwen3.abstract(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    folder, out = tmp_path / "folder", tmp_path / "out"
    hf_weights.write(folder, config, params, max_shard_bytes=20_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.model.process_probe", address]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)

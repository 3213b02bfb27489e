"""Checkpoints give back every bit, and say what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError, RecordError
from clawgym_jax.model.config import TINY
from clawgym_jax.model.qwen3 import init
from clawgym_jax.train.checkpoint import Checkpoints
from clawgym_jax.train.state import OptimConfig, init_state, make_optimizer, schedule

MODEL = TINY.replace(vocab_size=32, hidden_size=16, num_layers=1, num_experts=2)


def make_state(seed: int):
    _, params = init(MODEL, jax.random.key(seed))
    return init_state(params, make_optimizer(OptimConfig()))


def test_a_restored_state_is_the_saved_one_bit_for_bit(tmp_path: Path) -> None:
    state = make_state(1)
    saved = Checkpoints(tmp_path)
    saved.save(3, state, {"stage": "train", "done": 3})
    saved.close()
    opened = Checkpoints(tmp_path)
    found, cursor = opened.restore(make_state(2))
    opened.close()
    assert cursor == {"stage": "train", "done": 3}
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(4):
        checkpoints.save(step, make_state(step), {"done": step})
    checkpoints.wait()
    assert checkpoints.latest() == 3
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]
    checkpoints.close()


def test_an_empty_folder_is_a_clear_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(RecordError, match="no checkpoint"):
        checkpoints.restore(make_state(0))
    checkpoints.close()


def test_a_damaged_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, make_state(1), {"done": 3})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "3" / "state")
    with pytest.raises(
        RecordError, match=r"checkpoint .*/3 cannot be restored .* remove that folder"
    ):
        checkpoints.restore(make_state(0))
    checkpoints.close()


def test_the_schedule_warms_up_and_decays() -> None:
    rate = schedule(OptimConfig(learning_rate=1.0, warmup_steps=10, decay_steps=100))
    got = [float(rate(jnp.array(step))) for step in (0, 5, 10, 60, 110, 200)]
    np.testing.assert_allclose(got, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0], atol=1e-6)
    with pytest.raises(ConfigError, match="positive learning_rate"):
        make_optimizer(OptimConfig(learning_rate=0.0))

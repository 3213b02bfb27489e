"""Overrides change one field, and a wrong one says what would have been right."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.config import ExperimentConfig, configure, load_experiment, override, to_dict
from clawgym_jax.core.errors import ConfigError
from clawgym_jax.train.run_folder import RunFolder

BASE = ExperimentConfig(name="x")
EXPERIMENTS = sorted((Path(__file__).resolve().parent.parent / "experiments").glob("*.py"))


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("loop.steps=5", ("loop", "steps"), 5),
        ("optim.learning_rate=1e-3", ("optim", "learning_rate"), 1e-3),
        ("optim.grad_clip=1", ("optim", "grad_clip"), 1.0),
        ("harnesses=pi,claude_code", ("harnesses",), ("pi", "claude_code")),
        ("engine.kv_buckets=128,256", ("engine", "kv_buckets"), (128, 256)),
        ("batch.pack.share_context=False", ("batch", "pack", "share_context"), False),
        ("rollout.proxy.history=branch", ("rollout", "proxy", "history"), "branch"),
        ("sandbox=docker", ("sandbox",), "docker"),
    ],
)
def test_an_override_sets_its_field(setting: str, path: tuple[str, ...], value: object) -> None:
    found: object = override(BASE, [setting])
    for name in path:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("loop.step=5", "did you mean 'steps'"),
        ("looop.steps=5", "did you mean 'loop'"),
        ("loop.steps=many", "expected int, got 'many'"),
        ("loop.steps=2.5", "expected int"),
        ("loop=3", "name a field of it"),
        ("seed.x=3", "is a value"),
        ("loop.steps", "expected path.to.field=value"),
        ("loss.kind=ppo2", 'expected "clipped" or "sft"'),
        ("batch.pack.share_context=yes", "expected bool"),
        ("harnesses=", "at least one name"),
        ("loop.group_size=0", "group_size >= 1"),
        ("rollout.proxy.history=keep", "expected one of: restore, branch"),
        ("model.remat=all", "expected one of: none, products, attention, layers"),
        ("model.dtype=float16", 'expected "float32" or "bfloat16"'),
        ("mesh.x=0", "x >= 1"),
    ],
)
def test_a_wrong_override_says_what_was_expected(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        override(BASE, [setting])


def test_a_missing_experiment_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment file"):
        load_experiment(tmp_path / "nothing.py")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("CONFIG = 3\n")
    with pytest.raises(ConfigError, match="must define CONFIG"):
        load_experiment(wrong)


def test_an_experiment_has_its_scales() -> None:
    file = EXPERIMENTS[0].parent / "mix_grpo.py"
    assert configure(file, ["loop.steps=7"]).mesh.fsdp == 0
    paper = configure(file, ["loop.steps=7", "scale=paper"])
    assert (paper.mesh.fsdp, paper.mesh.x, paper.loop.steps) == (8, 8, 7)
    assert paper.model.micro_rows * paper.batch.pack.row_tok == 524_288
    with pytest.raises(ConfigError, match="expected one of: tiny, paper"):
        configure(file, ["scale=huge"])
    with pytest.raises(ConfigError, match="must define PAPER"):
        configure(file.parent / "quickstart.py", ["scale=paper"])


def test_a_run_folder_belongs_to_one_configuration(tmp_path: Path) -> None:
    RunFolder(tmp_path, to_dict(override(BASE, ["sandbox=nope"])))  # a try that failed: no claim
    first = RunFolder(tmp_path, to_dict(BASE))
    first.adopt()
    first.note(stage="here")
    again = RunFolder(tmp_path, to_dict(BASE))
    with first.lock(), pytest.raises(ConfigError, match="in use by another"), again.lock():
        pass
    with again.lock():  # free again
        pass
    assert again.progress == {"stage": "here"}
    with pytest.raises(ConfigError, match=r"changed: loop\.steps"):
        RunFolder(tmp_path, to_dict(override(BASE, ["loop.steps=7"])))
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        _ = again.progress

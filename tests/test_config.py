"""Overrides change one field, and a wrong one says what would have been right."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


# Fields that have to agree. One setting after the other, the first of each pair alone is refused.
AGREEING = [
    (["batch.pack.shorter=8192", "batch.pack.row_tok=16384"], "pack.shorter: expected"),
    (["batch.correction.low=3", "batch.correction.cap=5"], "expected 0 <= low < cap"),
    (["batch.correction.cap=0.4", "batch.correction.low=0.2"], "expected 0 <= low < cap"),
    (["engine.window_tok=256", "engine.prefill_chunks=32,128"], "at most window_tok=256"),
    (
        ["engine.slots=3", "engine.room_slots=2,1", "engine.room_tok=256,1024"],
        "with as many room_slots",
    ),
]


@pytest.mark.parametrize(("settings", "said"), AGREEING)
def test_fields_that_have_to_agree_are_set_in_any_order(settings: list[str], said: str) -> None:
    everyone = [override(BASE, order) for order in itertools.permutations(settings)]
    assert all(found == everyone[0] != BASE for found in everyone)
    with pytest.raises(ConfigError, match=said):  # what they come to is still checked
        override(BASE, settings[:2] if len(settings) > 2 else settings[:1])


@given(st.permutations([s for settings, _ in AGREEING[:2] + AGREEING[3:4] for s in settings]))
def test_settings_of_several_dataclasses_in_any_order(settings: list[str]) -> None:
    found = override(BASE, ["seed=7", *settings])
    assert found.seed == 7
    assert (found.batch.pack.shorter, found.batch.pack.row_tok) == ((8192,), 16384)
    assert (found.batch.correction.low, found.batch.correction.cap) == (3.0, 5.0)
    assert (found.engine.window_tok, found.engine.prefill_chunks) == (256, (32, 128))
    untouched = override(found, [
        "seed=0", "batch.pack.shorter=", "batch.pack.row_tok=2048", "batch.correction.low=0.5",
        "batch.correction.cap=2", "engine.window_tok=1024", "engine.prefill_chunks=32,128,512",
    ])  # fmt: skip
    assert untouched == BASE


def test_of_one_field_the_last_setting_counts() -> None:
    assert override(BASE, ["loop.steps=5", "loop.steps=0", "loop.steps=7"]).loop.steps == 7
    slots = configure(
        EXPERIMENTS[0].parent / "mix_grpo.py",
        ["scale=paper", "engine.slots=13", "engine.room_slots=8,4,1"],
    ).engine.slots
    assert slots == 13


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


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("loop.lr=1e-3", "no field 'lr'; fields here: "),
        ("loop.group_sizes=4", "did you mean 'group_size'"),
        ("learning_rate=1e-3", "did you mean 'optim.learning_rate'"),
        ("harnesses=('a','b')", "commas between, without brackets"),
        ("batch.pack.shorter=None", "expected ints with commas between"),
        ("optim.learning_rate=1e400", "expected float, got '1e400'"),
        ("loss.entropy_coef=-1", "loss.entropy_coef: expected at least 0"),
        ("batch.auxiliary_weight=-1", "batch.auxiliary_weight: expected at least 0"),
    ],
)
def test_what_a_newcomer_and_an_attacker_tried(setting: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        override(BASE, [setting])


def test_an_offline_run_is_told_at_once_what_the_recorded_run_lacks(tmp_path: Path) -> None:
    recorded = override(
        BASE, ["loop.steps=4", "cold_start.demonstrations=32", "cold_start.updates=5"]
    )
    RunFolder(tmp_path / "recorded", to_dict(recorded)).adopt()

    def check(*settings: str) -> None:
        config = to_dict(override(recorded, list(settings)))
        RunFolder(tmp_path / "new", config).check_recorded(tmp_path / "recorded")

    check()
    check("loop.steps=3", "batch.algorithm=ppo", "critic.pretrain_steps=1", "loss.clip_low=0.1")
    check("cold_start.updates=0", "cold_start.demonstrations=64")
    for settings, expected in {
        ("seed=7",): r"seed=7 \(recorded: 0\)",
        ("loop.group_size=2", "loop.instances=3"): r"instances=3 .*; loop.group_size=2 \(",
        ("cold_start.demonstrations=33",): r"demonstrations=33 \(recorded: 32\)",
        ("loop.steps=5",): r"5 steps \(recorded: 4; set loop.steps=4\)",
        ("batch.algorithm=ppo", "critic.pretrain_steps=1"):
            r"5 steps, 1 of them critic.pretrain_steps \(recorded: 4; set loop.steps=3\)",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=expected):
            check(*settings)


def test_a_run_goes_on_with_another_limit_of_the_gap(tmp_path: Path) -> None:
    RunFolder(tmp_path, to_dict(BASE)).adopt()
    RunFolder(tmp_path, to_dict(override(BASE, ["loop.reinforce.max_logprob_gap=0"]))).adopt()
    with pytest.raises(ConfigError, match=r"changed: .*loop\.steps"):
        changed = ["loop.reinforce.max_logprob_gap=1", "loop.steps=7"]
        RunFolder(tmp_path, to_dict(override(BASE, changed)))


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

"""Scores as published, no score for a broken grader (A9), and no way to tamper with one (A13)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.core.interfaces import Sandbox, SandboxFactory, SandboxSpec
from clawgym_jax.core.types import Grade
from clawgym_jax.sandbox.folders import remove_tree
from clawgym_jax.tasks.grading import Scoring, score_of
from clawgym_jax.tasks.task import FolderTask
from clawgym_jax.tasks.workspace_copy import copy_workspace

GOOD = 'import json, os, sys\nprint(json.dumps({"made": os.path.exists(sys.argv[1] + "/out.txt")}))'


def grade(
    check: str, workspace: Path, sandboxes: SandboxFactory, timeout_s: float = 20.0, **more: str
) -> Grade:
    reward = {"check.py": check.encode(), **{name: text.encode() for name, text in more.items()}}
    task = FolderTask("t", "i", "/workspace", reward=reward, score=Scoring(timeout_s))
    return asyncio.run(task.grade(workspace, sandboxes))


# ---- the score --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "score"),
    [
        ('{"a": 1, "b": 0.5, "c": true, "d": false}', 0.625),
        ('  {"a": "0.25", "reward": 0.75}\n', 0.5),  # float("0.25"), as published
        ("0.4\n", 0.4),
        ("true", 1.0),
        ("{}", 0.0),
        ("[1, 1]", 0.0),
        ("null", 0.0),
        ('{"a": 1, "note": "fine"}', 0.0),  # float("fine") fails there, and so the whole script
        ('{"a": null}', 0.0),
        ('{"a": NaN}', 0.0),
        ('{"a": Infinity}', 0.0),
        ("log line\n0.4", 0.0),  # the whole output must be JSON
        ("[" * 100_000, 0.0),
        ('{"a": 7}', 1.0),
        ('{"a": -1}', 0.0),
        ("\udcff", 0.0),
    ],
)
def test_score_of_what_a_grader_prints(printed: str, score: float) -> None:
    assert score_of(printed.encode("utf-8", "surrogateescape"))[0] == score


@given(st.dictionaries(st.text(max_size=5), st.floats(0, 1), min_size=1))
def test_score_is_the_mean(values: dict[str, float]) -> None:
    score, checks = score_of(json.dumps(values).encode())
    assert score == pytest.approx(sum(values.values()) / len(values)) and checks == values


@given(st.binary(max_size=60) | st.text().map(str.encode))
def test_any_output_has_a_score_in_range(printed: bytes) -> None:
    assert 0.0 <= score_of(printed)[0] <= 1.0


# ---- a broken grader (A9) ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "crashed with exit code 137"),
        ("import os; os._exit(137)", "crashed with exit code 137"),
        ("import os; os.abort()", "crashed with exit code 134"),
        ("pass", "printed nothing"),
        ("import time; time.sleep(60)", "ran over 1 s"),
    ],
)
def test_a_broken_grader_gives_no_score_but_a_reason(
    check: str, reason: str, sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    result = grade(check, tmp_path, sandboxes, timeout_s=1.0 if "sleep" in check else 20.0)
    assert result.score is None and reason in result.reason


@pytest.mark.parametrize("check", ["raise SystemExit(1)", "1/0", "print('no json')", "x ="])
def test_a_checker_that_fails_scores_zero_as_published(
    check: str, sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    result = grade(check, tmp_path, sandboxes)
    assert (result.score, result.reason) == (0.0, "")


class Unmakeable:
    kind = "none"

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("no disk")

    def sweep(self) -> int:
        return 0


def test_no_sandbox_is_no_score(tmp_path: Path) -> None:
    result = grade(GOOD, tmp_path, Unmakeable())
    assert result.score is None and "no disk" in result.reason


def test_a_reward_folder_without_check_py_is_no_score(
    sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    task = FolderTask("t", "i", "/workspace", reward={"reward.sh": b"echo 1"})
    result = asyncio.run(task.grade(tmp_path, sandboxes))
    assert result.score is None and "check.py" in result.reason


# ---- an agent that tampers (A13) --------------------------------------------------------------

LIE = "print('{\"made\": 1.0}')\nimport os\nos._exit(0)\n"


@pytest.mark.parametrize(
    "plants",
    [
        {"reward/check.py": LIE},
        {"reward/reward.sh": "echo 1.0"},
        {"reward/json.py": LIE, "reward/os.py": LIE},
        {"json.py": LIE, "os.py": LIE, "sys.py": LIE},
        {"sitecustomize.py": LIE, "usercustomize.py": LIE},
        {"reward": "a file in its place"},
        {"helper.py": LIE, "reward/helper.py": LIE},
    ],
    ids=lambda plants: "+".join(plants),
)
def test_planted_files_do_not_help(
    plants: dict[str, str], sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    for name, text in plants.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    check = f"import helper\n{GOOD}"
    assert grade(check, tmp_path, sandboxes, **{"helper.py": "x = 1"}).score == 0.0


def test_a_reward_folder_that_is_a_link_is_not_written_through(
    sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    elsewhere, workspace = tmp_path / "elsewhere", tmp_path / "w"
    elsewhere.mkdir()
    workspace.mkdir()
    (workspace / "reward").symlink_to(elsewhere)
    assert grade(GOOD, workspace, sandboxes).score == 0.0
    assert list(elsewhere.iterdir()) == []


TEST = """
import os

def test_made():
    assert os.path.exists(os.path.dirname(__file__) + "/../out.txt")
"""
HOOK = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""


def test_a_planted_conftest_and_pytest_ini_are_not_read(
    sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    check = """
import json, os, subprocess, sys
folder = os.path.dirname(os.path.abspath(__file__))
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
quick = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
done = subprocess.run(command, capture_output=True, text=True, env=quick)
sys.stderr.write(done.stdout)
print(json.dumps({"passed": done.returncode == 0, "ran": " in " in done.stdout}))
"""
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "evil.py").write_text(HOOK)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -p evil\n")
    more = {"test_it.py": TEST}
    assert grade(check, tmp_path, sandboxes, **more).checks == {"passed": 0.0, "ran": 1.0}
    (tmp_path / "out.txt").write_text("made")
    assert grade(check, tmp_path, sandboxes, **more).score == 1.0


def test_graders_do_not_see_the_trainer(
    sandboxes: SandboxFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "x")
    check = 'import os\nprint(1.0 if "TRAINER_SECRET" in os.environ else 0.5)'
    assert grade(check, tmp_path, sandboxes).score == 0.5


# ---- the copy ---------------------------------------------------------------------------------


def test_the_copy_keeps_what_stays_inside_and_drops_what_leads_out(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    (source / "a/b").mkdir(parents=True)
    target.mkdir()
    (source / "a/file").write_text("text")
    (source / "a/file").chmod(0o750)
    (source / "reward").mkdir()
    (source / "reward/early").write_text("x")
    os.mkfifo(source / "fifo")
    links = {
        "good": "a/file",
        "a/b/up": "../file",
        "absolute": "/work/a/file",
        "dangling": "nowhere",
        "bad_host": "/etc/passwd",
        "bad_up": "../s2",
        "bad_reward": "reward/check.py",
        "a/bad_reward": "../reward/check.py",
        "folder": "a/b",
        "bad_through": "folder/../../reward/check.py",
        "bad_absolute": "/work/reward",
        "bad_loop": "bad_loop",
        "a/bad_escape": "b/../../../etc",
        "bad_sibling": "/workspace2/x",
        "bad_slashes": "//work/reward/check.py",
        "bad_dots": "/./work/././reward/check.py",
        "bad_round": "/work/a/../reward/check.py",
        "slashes": "//work//a/./file",
    }
    for name, points_to in links.items():
        (source / name).symlink_to(points_to)
    copy_workspace(source, target, "/work", without="reward")
    copied = {str(p.relative_to(target)) for p in target.rglob("*")}
    kept = {name for name in links if "bad" not in name}
    assert copied == {"a", "a/b", "a/file"} | kept
    assert (target / "a/file").stat().st_mode & 0o777 == 0o750
    assert os.readlink(target / "absolute") == "/work/a/file"
    assert (target / "good").read_text() == "text"


def test_the_copy_survives_deep_and_unreadable_folders(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    source.mkdir()
    target.mkdir()
    (source / "kept").write_text("x")
    here = os.open(source, os.O_RDONLY)
    for _ in range(40):  # a path longer than the kernel takes at once
        os.mkdir("d" * 200, dir_fd=here)
        deeper = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    copy_workspace(source, target, "/work", without="reward")
    assert (target / "kept").read_text() == "x"
    remove_tree(source)
    remove_tree(target)


def test_a_workspace_too_large_scores_zero(sandboxes: SandboxFactory, tmp_path: Path) -> None:
    (tmp_path / "out.txt").touch()
    os.truncate(tmp_path / "out.txt", 1 << 40)
    assert grade(GOOD, tmp_path, sandboxes).score == 0.0

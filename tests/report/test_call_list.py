"""Calls in the terminal, and the launch script as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.report.call_list import print_calls
from clawgym_jax.rollout.store import CALLS
from tests.report.runs import TOKENIZER, log_calls, whole_run
from tests.tree.histories import make_call

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "report.py"
EPISODE = "train-s0001-g000-r00"


def printed(folder: Path, episode: str | None = None, full: bool = False) -> str:
    out = StringIO()
    console = Console(file=out, highlight=False, soft_wrap=True)
    print_calls(console, folder, ChatCodec.from_folder(TOKENIZER), episode, full)
    return out.getvalue()


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120
    )


def test_every_call_is_named_with_its_ledger(tmp_path: Path) -> None:
    whole_run(tmp_path)
    text = printed(tmp_path)
    for call in read_calls(tmp_path / CALLS):
        line = f"  {call.call_id}  {call.role}  chain "
        assert text.count(line) == 1, line
        ledger = f"prompt {call.prompt_tok} = shared 0 + spliced 0 + encoded {call.prompt_tok}"
        assert ledger in text
    assert "breaks: retry" in text and "attempt 1" in text and "versions 2" in text
    assert "infrastructure failure  no score  no sandbox" in text
    assert "found:" not in text  # texts are printed on demand
    assert "\x1b" not in text and "\u202e" not in text


def test_an_episode_is_printed_with_its_texts(tmp_path: Path) -> None:
    whole_run(tmp_path)
    text = printed(tmp_path, EPISODE)
    assert "train-s0000-g000-r00" not in text
    assert "    Write the first line of a.txt to b.txt." in text
    assert text.count("found: </span><script>alert('x')</script>") == 1
    assert text.count("done ✓ naïve") == 3
    assert "\x1b" not in text


def test_long_texts_are_cut_unless_all_is_asked_for(tmp_path: Path) -> None:
    codec = ChatCodec.from_folder(TOKENIZER)
    ids = codec.encode_text("begin " + "many words " * 500 + "end").tolist()
    log_calls(tmp_path, [make_call(0, ids, [5], episode="long")])
    assert "characters left out" in printed(tmp_path, "long")
    whole = printed(tmp_path, full=True)
    assert "characters left out" not in whole and whole.count("many words") == 500
    assert "not settled yet" in whole


def test_an_unknown_episode_names_the_nearest(tmp_path: Path) -> None:
    whole_run(tmp_path)
    with pytest.raises(ConfigError, match=r"nearest: train-s0001-g000-r00"):
        printed(tmp_path, "train-s0001-g000-r09")
    with pytest.raises(ConfigError, match="no call is logged yet"):
        printed(tmp_path / "empty", "x")


def test_the_script_prints_json_last(tmp_path: Path) -> None:
    whole_run(tmp_path)
    done = launch(f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    path, last = done.stdout.splitlines()
    assert path == str(tmp_path / "report.html") and Path(path).is_file()
    assert json.loads(last) == {"report": path, "steps": 3, "episodes": 2, "calls": 6}
    done = launch(f"--workdir={tmp_path}", "--calls", f"--episode={EPISODE}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"episodes": 1, "calls": 5}


def test_errors_have_no_traceback(tmp_path: Path) -> None:
    done = launch(f"--workdir={tmp_path / 'nowhere'}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    done = launch(f"--workdir={tmp_path}", "--full")
    assert done.returncode == 1 and "add --calls" in done.stdout + done.stderr

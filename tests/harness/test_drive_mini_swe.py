"""The real mini-swe-agent, led through a script: it appends, but for turns without a good call."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.mini_swe import CLOSING, MiniSwe
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.tree.filters import DEAD_LEAF, FilterConfig
from tests.harness.stagehand import Part, assert_appends, assert_sampled_once, perform, roles_of
from tests.proxy.support import call_text

pytestmark = [
    pytest.mark.docker,
    pytest.mark.real_harness,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
TURN_OPENING_TOK = 3  # <|im_start|>, assistant, newline


def bash(command: str) -> str:
    return call_text("bash", {"command": command})


def test_read_edit_parallel_malformed_done(tmp_path: Path) -> None:
    lines = [
        "I read the notes.\n" + bash("cat notes.txt; pwd"),
        bash("sed -i s/beta/gamma/ notes.txt"),
        bash("printf first > a.txt; echo one") + "\n" + bash("printf second > b.txt; echo two"),
        call_text("bash", '{"command": "ls'),  # broken: dropped from the history
        "I am done, I think.",  # no call at all: dropped too
        bash("echo went on"),
        bash(f"echo {CLOSING}"),
    ]
    parts = [Part("Edit the notes", list(lines))]
    files = {"notes.txt": "alpha\nbeta\n"}
    played = perform(MiniSwe(), *parts, instruction="Edit the notes.", base=tmp_path, inputs=files)
    why = played.explain()

    assert played.result.returncode == 0, why
    assert played.files["notes.txt"] == "alpha\ngamma\n", why
    assert (played.files["a.txt"], played.files["b.txt"]) == ("first", "second"), why
    assert_sampled_once(played)
    assert roles_of(played) == [Role.MAIN] * 7, why

    calls = played.calls
    assert_appends(calls[:4], why)
    assert_appends(calls[5:], why)
    for dropped, after in ((3, 4), (4, 5)):  # the prompt goes on from the turn before instead
        assert not extends(calls[after].prompt_ids, calls[dropped]), why
        assert calls[after].breaks == ("dropped turn",), why
        kept = calls[dropped].prompt_tok - TURN_OPENING_TOK
        assert calls[after].prompt_ids[:kept].tolist() == calls[dropped].prompt_ids[:kept].tolist()
    # Each dropped turn is a leaf of its own, and that is the reason the ledger gives.
    selection = played.select(FilterConfig())
    assert selection.dropped == {3: DEAD_LEAF, 4: DEAD_LEAF}, why
    assert selection.kept == (0, 1, 2, 5, 6) and selection.leaves == 3, why

"""Where two prefixes part and why, on recorded calls with words as tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.types import CallRecord, Span
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.tree import explain as e
from clawgym_jax.tree.explain import explain, explain_chains
from tests.tree.histories import make_call

START, END = 1, 2
WORDS = ["", "<s>", "</s>", "\n", "system", "user", "assistant"]


def ids(*messages: str) -> list[int]:
    """Messages "role words...", each as START role LINE words END."""
    out: list[int] = []
    for message in messages:
        role, *words = message.split()
        out += [START, word(role), 3, *map(word, words), END]
    return out


def word(text: str) -> int:
    if text not in WORDS:
        WORDS.append(text)
    return WORDS.index(text)


def decode(array: np.ndarray) -> str:
    return " ".join(WORDS[i] for i in array.tolist()).replace(" \n ", "\n").replace(" \n", "\n")


def call(ordinal: int, prompt: list[int], said: str, **more: Any) -> CallRecord:
    opening = [START, word("assistant"), 3]
    made = make_call(ordinal, [*prompt, *opening], [*map(word, said.split()), END])
    return dataclasses.replace(made, **more)


FIRST = call(0, ids("system act", "user go", "user state: idle"), "looking")


@pytest.mark.parametrize(
    ("prompt", "what", "role"),
    [
        (ids("system act now", "user go", "user state: idle"), e.CHANGED, "system"),
        (ids("system act", "user gone", "user state: idle"), e.CHANGED, "user"),
        (ids("system act", "user more", "user go", "user state: idle"), e.INSERTED, "user"),
        (ids("system act", "user state: idle"), e.TAKEN_AWAY, "user"),
        (ids("system act", "user go", "user state: idle", "user again"), e.NOT_THERE, "assistant"),
        (
            ids("system act", "user go", "user state: idle", "assistant seeing", "user more"),
            e.EDITED_TURN,
            "assistant",
        ),
    ],
)
def test_where_and_why(prompt: list[int], what: str, role: str) -> None:
    later = call(1, prompt, "done", breaks=("edited history",))
    found = explain(FIRST, later, decode, START)
    assert (found.appends, found.what, found.role) == (False, what, role)
    assert found.causes == ("edited history",)
    assert what in found.sentence() and "edited history" in found.sentence()
    assert found.shared_tok < found.earlier_tok


def test_a_moving_tail_is_told_from_one_that_goes() -> None:
    for tail, what in (("user state: idle", e.MOVED), ("user state: busy", e.TAKEN_AWAY)):
        prompt = ids("system act", "user go", "assistant looking", "user found", tail)
        spans = (Span(len(ids("system act", "user go")) + 3, 2, "e.0"),)
        later = call(1, prompt, "done", spans=spans, continues=("e.0",))
        found = explain(FIRST, later, decode, START)
        assert (found.what, found.message, found.role) == (what, 2, "user")
        assert found.before.startswith("user\nstate: idle")


def test_the_same_prompt_and_a_shorter_one() -> None:
    again = make_call(1, FIRST.prompt_ids.tolist(), [9, END])
    assert explain(FIRST, again, decode, START).what == e.SAME
    shorter = make_call(1, ids("system act", "user go"), [9, END])
    assert explain(FIRST, shorter, decode, START).what == e.SHORTER


def test_an_appending_call_says_so() -> None:
    whole = [*FIRST.prompt_ids.tolist(), *FIRST.completion.ids.tolist()]
    later = call(1, [*whole, *ids("user more")], "done")
    found = explain(FIRST, later, decode, START)
    assert found.appends and found.sentence() == "appends to e.0"
    assert explain_chains([FIRST, later], decode, START) == {"e.1": found}


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_any_two_calls_can_be_explained(prompt: list[int], said: list[int], new: list[int]) -> None:
    one, two = make_call(0, prompt, said), make_call(1, new, [9])
    found = explain(one, two, decode, START)
    assert found.appends == extends(two.prompt_ids, one)
    old = [*prompt, *said]
    assert old[: found.shared_tok] == new[: found.shared_tok]
    assert found.sentence()

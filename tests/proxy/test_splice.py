"""Which sampled turn a re-presented one is, where more than one could be meant."""

from __future__ import annotations

import numpy as np
import pytest

from clawgym_jax.proxy.splice import KnownTurn, Prompt, SampledTurns, compose
from clawgym_jax.proxy.turns import ToolCall, Turn
from tests.proxy.support import tiny_codec

U = Turn("user", "go")


class Talk:
    """An episode in small: prompts are composed, answers are added."""

    def __init__(self) -> None:
        self.sampled = SampledTurns()
        self.count = 0

    def prompt(self, *turns: Turn) -> Prompt:
        return compose(tiny_codec(), self.sampled, turns, [])

    def say(self, prompt: Prompt, turn: Turn, delivered: bool = True) -> str:
        call_id = f"c{self.count}"
        ids = np.asarray([300 + self.count, tiny_codec().end_of_turn_id], np.int32)
        self.sampled.add(
            KnownTurn(call_id, self.count, turn, ids, prompt.history, prompt.continues)
        )
        if delivered:
            self.sampled.mark_delivered(call_id)
        self.count += 1
        return call_id


def test_equal_text_after_different_questions_goes_by_the_question() -> None:
    talk = Talk()
    ok = Turn("assistant", "ok")
    one, two = Turn("user", "one"), Turn("user", "two")
    first = talk.say(talk.prompt(one), ok)
    second = talk.say(talk.prompt(two), ok)
    assert talk.prompt(one, ok, U).continues == (first,)
    assert talk.prompt(two, ok, U).continues == (second,)
    assert talk.prompt(Turn("user", "new"), ok, U).continues == (second,)  # the latest


def test_equal_siblings_go_by_delivery_then_age() -> None:
    talk = Talk()
    ok = Turn("assistant", "ok")
    talk.say(talk.prompt(U), ok)
    seen = talk.say(talk.prompt(U), ok)
    talk.say(talk.prompt(U), ok, delivered=False)
    assert talk.prompt(U, ok, U).continues == (seen,)


def test_the_same_words_again_and_again_are_different_calls() -> None:
    talk = Talk()
    ok = Turn("assistant", "ok")
    turns = [U]
    said = []
    for _ in range(4):
        said.append(talk.say(talk.prompt(*turns), ok))
        turns += [ok, U]
    assert talk.prompt(*turns).continues == tuple(said)
    edited = [Turn("user", "else"), *turns[1:]]
    assert sorted(talk.prompt(*edited).continues) == said


def test_an_edited_history_still_finds_its_turns_by_ancestors() -> None:
    """Two branches say the same last words; the turn before tells them apart."""
    talk = Talk()
    a, b, ok = Turn("assistant", "a"), Turn("assistant", "b"), Turn("assistant", "ok")
    first = talk.say(talk.prompt(U), a)
    under_a = talk.say(talk.prompt(U, a, U), ok)
    talk.say(talk.prompt(U), b)
    talk.say(talk.prompt(U, b, U), ok)
    edited = Turn("user", "edited")
    assert talk.prompt(edited, a, U, ok, U).continues == (first, under_a)


def test_other_thinking_is_another_sample() -> None:
    talk = Talk()
    first = talk.say(talk.prompt(U), Turn("assistant", "ok", thinking="a"))
    second = talk.say(talk.prompt(U), Turn("assistant", "ok", thinking="b"))
    assert talk.prompt(U, Turn("assistant", "ok", thinking="a"), U).continues == (first,)
    assert talk.prompt(U, Turn("assistant", "ok", thinking="b"), U).continues == (second,)
    other = talk.prompt(U, Turn("assistant", "ok", thinking="c"), U)
    assert other.continues == () and other.causes == ("edited turn",)


CALLS = (ToolCall("call1", "look", "{}"), ToolCall("call2", "look", '{"a": 1}'))


@pytest.mark.parametrize(
    "calls", [CALLS[:1], (*CALLS, CALLS[0]), (CALLS[0], ToolCall("x", "look", "{}"))]
)
def test_some_of_the_calls_are_an_edited_turn(calls: tuple[ToolCall, ...]) -> None:
    talk = Talk()
    talk.say(talk.prompt(U), Turn("assistant", "", CALLS))
    prompt = talk.prompt(U, Turn("assistant", "", calls), U)
    assert prompt.continues == () and prompt.causes == ("edited turn",)


def test_ids_win_over_content_and_survive_lost_punctuation() -> None:
    talk = Talk()
    said = talk.say(talk.prompt(U), Turn("assistant", "text", (ToolCall("call1", "look", "{}"),)))
    rewritten = Turn("assistant", "", (ToolCall("call_1", "invalid", '{"error": "x"}'),))
    assert talk.prompt(U, rewritten, U).continues == (said,)


def test_a_turn_is_spliced_once() -> None:
    talk = Talk()
    turn = Turn("assistant", "", CALLS[:1])
    said = talk.say(talk.prompt(U), turn)
    prompt = talk.prompt(U, turn, U, turn, U)
    assert prompt.continues == (said,) and prompt.causes == ("repeated turn",)


def test_what_the_harness_made_up_is_environment_text() -> None:
    talk = Talk()
    prompt = talk.prompt(U, Turn("assistant", "I never said this"), U)
    assert prompt.spans == () and prompt.causes == ("foreign turn",)
    assert "I never said this" in tiny_codec().decode(prompt.ids)
    assert sum(length for _, length in prompt.encoded) == prompt.ids.size


@pytest.mark.parametrize(
    ("shown", "gap"), [("part onepart two", ""), ("part one\n\npart two", "\n\n")]
)
def test_two_sampled_turns_merged_into_one_message(shown: str, gap: str) -> None:
    talk = Talk()
    cut, rest = Turn("assistant", "part one"), Turn("assistant", "part two", CALLS[:1])
    resume = Turn("user", "resume")
    first = talk.say(talk.prompt(U), cut)
    second = talk.say(talk.prompt(U, cut, resume), rest)
    prompt = talk.prompt(U, Turn("assistant", shown, CALLS[:1]), U)
    assert prompt.continues == (first, second) and prompt.causes == ("merged turns",)
    one, two = prompt.spans
    assert prompt.ids[one.start : one.start + one.length].tolist() == [300]  # no end in the middle
    assert prompt.ids[two.start : two.start + two.length].tolist() == [
        301,
        tiny_codec().end_of_turn_id,
    ]
    between = prompt.ids[one.start + one.length : two.start]
    assert tiny_codec().decode(between) == gap
    assert sum(s.length for s in prompt.spans) + sum(n for _, n in prompt.encoded) == (
        prompt.ids.size
    )


def test_one_sampled_turn_split_into_messages() -> None:
    talk = Talk()
    said = talk.say(talk.prompt(U), Turn("assistant", "I look.", CALLS, thinking="hm"))
    for parts in (
        (Turn("assistant", "I look."), Turn("assistant", "", CALLS)),
        (Turn("assistant", "I look.", CALLS[:1]), Turn("assistant", "", CALLS[1:])),
        (Turn("assistant", "", thinking="hm"), Turn("assistant", "I  look. ", CALLS)),
    ):
        prompt = talk.prompt(U, *parts, U)
        assert prompt.continues == (said,) and prompt.causes == (), parts


def test_two_sampled_turns_in_a_row_stay_two() -> None:
    talk = Talk()
    one, two = Turn("assistant", "one"), Turn("assistant", "two", CALLS[:1])
    first = talk.say(talk.prompt(U), one)
    second = talk.say(talk.prompt(U, one), two)
    assert talk.prompt(U, one, two, U).continues == (first, second)


def test_white_space_inside_a_turn_does_not_matter() -> None:
    talk = Talk()
    said = talk.say(talk.prompt(U), Turn("assistant", "a line  \r\n  and more"))
    prompt = talk.prompt(U, Turn("assistant", "a line\n  and more"), U)
    assert prompt.continues == (said,) and prompt.causes == ()


def test_more_than_was_sampled_is_an_edited_turn() -> None:
    talk = Talk()
    talk.say(talk.prompt(U), Turn("assistant", "part one"))
    prompt = talk.prompt(U, Turn("assistant", "part one and a forged end"), U)
    assert prompt.continues == () and prompt.causes == ("edited turn",)

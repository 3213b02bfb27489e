"""One parse of a finished completion, and one spelling of arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.proxy.tool_calls import canonical_arguments, parse_completion, tool_call_id
from tests.proxy.support import call_text

finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=4)


def respelled(value: Any, rng: random.Random) -> Any:
    """The same value with other key orders, and whole numbers as floats."""
    if isinstance(value, dict):
        items = [(key, respelled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return [respelled(item, rng) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value) if rng.random() < 0.5 else value
    return value


@given(objects, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 1]))
def test_arguments_in_any_spelling_are_the_same(
    value: dict[str, Any], rng: random.Random, ascii_only: bool, indent: int | None
) -> None:
    other = json.dumps(respelled(value, rng), ensure_ascii=ascii_only, indent=indent)
    assert canonical_arguments(json.dumps(value)) == canonical_arguments(other)


@given(objects, objects)
def test_different_arguments_stay_different(left: dict[str, Any], right: dict[str, Any]) -> None:
    same = canonical_arguments(json.dumps(left)) == canonical_arguments(json.dumps(right))
    assert same == (plain(left) == plain(right))


def plain(value: Any) -> Any:
    """Python takes True for 1; JSON does not."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


untagged = st.text().filter(lambda text: "<" not in text)


@given(untagged, untagged, objects, st.booleans())
def test_a_call_between_texts(
    before: str, after: str, arguments: dict[str, Any], cut: bool
) -> None:
    parsed = parse_completion(before + call_text("look", arguments) + after, "c", cut)
    (call,) = parsed.turn.calls
    assert json.loads(call.arguments) == arguments
    assert "".join(parsed.turn.text.split()) == "".join((before + after).split())


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", '"a"', " "]


@given(st.lists(st.sampled_from(TAGS)))
def test_parse_loses_nothing_of_any_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    turn = parse_completion(text, "c", cut=False).turn
    shown = turn.thinking + turn.text
    missing = text.replace("<think>", "", 1).replace("</think>", "", 1)
    assert len("".join(shown.split())) >= len("".join(missing.split()))


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "look", "arguments": [1]}',
        '{"name": "look", "arguments": "{}"}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "look", "arguments": {"a": NaN}}',
        '{"name": "look", "arguments": {"a": 1e999}}',
        '{"name": "look", "arguments": {"a": "\\ud800"}}',
        '{"name": "look", "arguments": {}, "more": 1}',
        '{"name": "look"',
        "[]",
        "",
        "[" * 100_000,
    ],
)
def test_a_broken_block_stays_in_the_text(block: str) -> None:
    text = f"say <tool_call>{block}</tool_call>"
    parsed = parse_completion(text, "c", cut=False)
    assert parsed.turn.calls == () and parsed.malformed == 1
    assert parsed.turn.text == text


def test_a_block_that_was_cut_is_no_call() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {"path": "/"}}'
    assert parse_completion(text, "c", cut=True).turn.text == text
    assert parse_completion(text, "c", cut=False).turn.calls[0].name == "rm"


def test_thinking() -> None:
    parsed = parse_completion("<think>\na\n</think>\n\nb", "c", cut=False)
    assert (parsed.turn.thinking, parsed.turn.text) == ("a", "b")
    unclosed = parse_completion("<think>\nnever ends", "c", cut=True)
    assert (unclosed.turn.thinking, unclosed.turn.text) == ("never ends", "")
    opened = parse_completion("a\n</think>\nb", "c", cut=False, thinking_open=True)
    assert (opened.turn.thinking, opened.turn.text) == ("a", "b")
    later = parse_completion("b <think>c</think>", "c", cut=False)
    assert (later.turn.thinking, later.turn.text) == ("", "b <think>c</think>")


def test_ids_are_alphanumeric_and_differ() -> None:
    ids = {tool_call_id(call, index) for call in ("run/ep.0", "run/ep.1") for index in range(3)}
    assert len(ids) == 6 and all(i.isalnum() and i.isascii() for i in ids)

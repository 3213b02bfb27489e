"""One parse of a finished completion, and one spelling of arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.tool_calls import (
    PARSERS,
    canonical_arguments,
    parse_completion,
    parser_named,
    raw_calls_as_text,
    tool_call_id,
)
from clawgym_jax.proxy.turns import Turn
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
    ("block", "arguments"),
    [
        ('{"name": "look", "arguments": [1]}', "[1]"),
        ('{"name": "look", "arguments": "{}"}', '"{}"'),
        ('{"name": "look", "arguments": {"a": NaN}}', '{"a": NaN}'),
        ('{"name": "look", "arguments": {"a": 1e999}}', '{"a": 1e999}'),
        ('{"name": "look", "arguments": {"a": "\\ud800"}}', '{"a": "\\ud800"}'),
        ('{"name": "look", "arguments": {}, "more": 1}', '{}, "more": 1'),
        ('{"name": "look", "arguments": {"a": }}', '{"a": }'),
        ('{"arguments": {"a": }, "name": "look"}', '{"a": }'),
    ],
)
def test_a_broken_call_with_a_name_goes_out_raw(block: str, arguments: str) -> None:
    for cut in (False, True):
        parsed = parse_completion(f"say <tool_call>{block}</tool_call> more", "c", cut)
        (call,) = parsed.turn.calls
        assert (call.name, call.arguments, parsed.malformed) == ("look", arguments, 1)
        assert parsed.turn.text == "say\nmore"
    shown = raw_calls_as_text(parsed.turn)
    assert shown.calls == () and arguments in shown.text and "say\nmore" in shown.text


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "\\ud800", "arguments": {"a": }}',
        '{"name": "look"',
        '{"name": "look" "arguments": {}}',
        "[]",
        "",
        "[" * 100_000,
    ],
)
def test_a_block_without_a_name_stays_in_the_text(block: str) -> None:
    text = f"say <tool_call>{block}</tool_call>"
    parsed = parse_completion(text, "c", cut=False)
    assert parsed.turn.calls == () and parsed.malformed == 1
    assert parsed.turn.text == text


def test_a_block_that_was_cut_is_no_call() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {"path": "/"}}'
    cut = parse_completion(text, "c", cut=True)
    assert (cut.turn.text, cut.turn.calls, cut.malformed) == (text, (), 1)
    assert parse_completion(text, "c", cut=False).turn.calls[0].name == "rm"
    broken = '<tool_call>{"name": "rm", "arguments": {"path": }}'
    assert parse_completion(broken, "c", cut=False).turn.text == broken


def test_a_closing_tag_inside_of_an_argument() -> None:
    for content in ("</tool_call>", "<tool_call></tool_call>", "a</tool_call>\n<tool_call>b"):
        text = call_text("write", {"content": content}) + call_text("look", {})
        first, second = parse_completion(text, "c", cut=False).turn.calls
        assert json.loads(first.arguments) == {"content": content} and second.name == "look"


XML = """<tool_call>
<function=run>
<parameter=command>
ls -l
  "a"
</parameter>
<parameter=timeout>
30
</parameter>
<parameter=flags>
["x", {"y": null}]
</parameter>
<parameter=count>
many
</parameter>
</function>
</tool_call>"""
RUN: Any = {
    "type": "function",
    "function": {
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout": {"type": "integer"},
                "flags": {"type": "array"},
                "count": {"type": "number"},
            },
        },
    },
}


def test_xml_form_types_values_by_the_schema() -> None:
    parse = parser_named("qwen3_xml")
    parsed = parse(f"<think>hm</think>so\n{XML}", "c", False, tools=[RUN])
    (call,) = parsed.turn.calls
    assert (parsed.turn.thinking, parsed.turn.text, parsed.malformed) == ("hm", "so", 0)
    assert json.loads(call.arguments) == {
        "command": 'ls -l\n  "a"',
        "timeout": 30,
        "flags": ["x", {"y": None}],
        "count": "many",
    }
    untyped = json.loads(parse(XML, "c", False).turn.calls[0].arguments)
    assert untyped["timeout"] == "30"


@pytest.mark.parametrize("parameters", ["<parameter=a>1", "words", "<parameter=a>1</parameter>x"])
def test_broken_xml_parameters_go_out_raw(parameters: str) -> None:
    text = f"<tool_call><function=run>{parameters}</function></tool_call>"
    parsed = parser_named("qwen3_xml")(text, "c", False)
    assert parsed.turn.calls[0].arguments == parameters and parsed.malformed == 1
    nameless = "<tool_call><function=></function></tool_call>"
    assert parser_named("qwen3_xml")(nameless, "c", False).turn.text == nameless


def test_parsers_are_chosen_by_name() -> None:
    text = "<think>a</think>" + call_text("look", {})
    assert parser_named("qwen3")(text, "c", False) == parse_completion(text, "c", False)
    assert parser_named("none")(text, "c", False).turn == Turn("assistant", text)
    with pytest.raises(ConfigError, match="qwen3_xml"):
        parser_named("qwen2")


XML_TAGS = ["<function=a>", "</function>", "<parameter=b>", "</parameter>"]
JSON_PARTS = ['{"name": "a", "arguments": ', "{", "}", '"', "x"]


@given(st.lists(st.sampled_from([*TAGS, *XML_TAGS, *JSON_PARTS])))
def test_no_text_breaks_a_parser(pieces: list[str]) -> None:
    for name in PARSERS:
        for cut in (False, True):
            turn = parser_named(name)("".join(pieces), "c", cut).turn
            assert all(call.name and call.id for call in turn.calls)
            assert raw_calls_as_text(raw_calls_as_text(turn)) == raw_calls_as_text(turn)


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

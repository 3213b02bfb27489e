"""What an answer is made of: the parser's reading, counts, and what a wire form can carry."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from clawgym_jax.core.types import Finish
from clawgym_jax.proxy import ChatCodec
from clawgym_jax.proxy.answers import answer_of, visible_text
from clawgym_jax.proxy.splice import Prompt
from clawgym_jax.proxy.tool_calls import parser_named
from clawgym_jax.proxy.turns import Answer, Request
from tests.proxy.support import TINY, call_text, completion, tiny_codec

BROKEN = call_text("look", '{"path": }')
PROMPT = Prompt(np.arange(7, dtype=np.int32), (), (), 0, ())


def answered(
    said: str, finish: Finish = Finish.STOP, codec: ChatCodec | None = None, **more: Any
) -> Answer:
    codec = codec or tiny_codec()
    sampled = completion(codec.encode_rendered(said).tolist(), finish)
    text = visible_text(codec, sampled)
    return answer_of(codec, "run", "ep.0", PROMPT, sampled, text, 1.5, **more)


def test_counts() -> None:
    said = "<think>\nhm\n</think>\n\nok<|im_end|>"
    answer = answered(said)
    ids = tiny_codec().encode_rendered(said).tolist()
    assert (answer.prompt_tok, answer.completion_tok) == (7, len(ids))
    assert answer.reasoning_tok == ids.index(tiny_codec().token_id("</think>")) + 1
    assert (answer.turn.thinking, answer.turn.text, answer.finish) == ("hm", "ok", "stop")
    assert answer.created_s == 1
    assert answered("ok<|im_end|>").reasoning_tok == 0


def test_reasoning_that_never_ended_is_all_there_is() -> None:
    answer = answered("<think>\nhm hm", Finish.LENGTH)
    assert answer.reasoning_tok == answer.completion_tok > 0
    assert (answer.turn.thinking, answer.finish) == ("hm hm", "length")


def test_reasoning_where_its_tags_are_plain_text() -> None:
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"] = [t for t in spec["added_tokens"] if "think" not in t["content"]]
    config = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    codec = ChatCodec(json.dumps(spec), config, config["chat_template"])
    answer = answered("<think>\nhm\n</think>\n\nok<|im_end|>", codec=codec)
    assert answer.turn.thinking == "hm"
    assert answer.reasoning_tok == codec.encode_text("hm").size < answer.completion_tok


def test_broken_calls_are_raw_or_text() -> None:
    raw = answered(BROKEN + call_text("look", {}))
    assert [call.arguments for call in raw.turn.calls] == ['{"path": }', "{}"]
    assert (raw.finish, raw.malformed_calls) == ("tool", 1)
    mixed = answered(BROKEN + call_text("look", {}), carries_raw_calls=False)
    assert mixed.turn.calls == raw.turn.calls[1:] and '{"path": }' in mixed.turn.text
    assert (mixed.finish, mixed.malformed_calls) == ("tool", 1)
    shown = answered(BROKEN, carries_raw_calls=False)
    assert (shown.turn.calls, shown.turn.text, shown.finish) == ((), BROKEN, "stop")


@pytest.mark.parametrize(
    ("protocol", "stream", "carries"),
    [
        ("anthropic", True, True),
        ("anthropic", False, False),
        ("openai-chat", False, True),
        ("openai-responses", False, True),
    ],
)
def test_who_can_carry_raw_calls(protocol: str, stream: bool, carries: bool) -> None:
    request = Request(protocol, "m", (), (), None, stream=stream)
    assert request.carries_raw_calls is carries


def test_another_parser() -> None:
    said = "<tool_call><function=run><parameter=n>3</parameter></function></tool_call>"
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "run", "parameters": parameters}}]
    answer = answered(said, parse=parser_named("qwen3_xml"), tools=tools)
    assert [call.arguments for call in answer.turn.calls] == ['{"n": 3}']
    plain = answered(said, parse=parser_named("none"))
    assert (plain.turn.calls, plain.turn.text, plain.finish) == ((), said, "stop")

"""Segments against the model's own template and tokenizer, for the tiny model and for Qwen3."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy import ChatCodec
from clawgym_jax.proxy.faults import RequestFault
from clawgym_jax.proxy.rendering import Stretch
from clawgym_jax.proxy.splice import KnownTurn, SampledTurns, compose
from clawgym_jax.proxy.tool_calls import parse_completion
from clawgym_jax.proxy.turns import Turn
from tests.proxy.qwen3 import qwen3_codec, qwen3_folder
from tests.proxy.support import LOOK, TINY, tiny_codec

CODECS = {"tiny": (tiny_codec, lambda: TINY), "qwen3": (qwen3_codec, qwen3_folder)}
both = pytest.mark.parametrize(("codec_of", "folder_of"), CODECS.values(), ids=CODECS.keys())
Codec = Callable[[], ChatCodec]
Folder = Callable[[], Path]

ordinary = st.text(
    st.one_of(
        st.sampled_from("ab ,.\n\t{}\"'\\<>|_/0123é中🙂"),
        st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters="\ufeff"),
    ),
    max_size=30,
).filter(lambda text: not re.search(r"<\|?/?[a-z_]+\|?>", text))  # looks like an added token
arguments = st.dictionaries(
    st.sampled_from(["path", "a", "b"]),
    st.one_of(
        ordinary, st.integers(-9, 9), st.booleans(), st.none(), st.lists(ordinary, max_size=2)
    ),
    max_size=3,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """System text or none, then user turns, tool rounds and answers in any plausible order."""
    turns: list[Turn] = []
    if draw(st.booleans()):
        turns.append(Turn("system", draw(ordinary.filter(str.strip))))
    turns.append(Turn("user", draw(ordinary)))
    for _ in range(draw(st.integers(0, 3))):
        calls = draw(st.lists(arguments, max_size=3))
        said = draw(ordinary).strip()
        blocks = [json.dumps({"name": "look", "arguments": a}, ensure_ascii=False) for a in calls]
        body = "\n".join([*([said] if said else []), *map(block_of, blocks)])
        parsed = parse_completion(body, f"c{len(turns)}", cut=False)
        turns.append(parsed.turn)
        turns += [Turn("tool", draw(ordinary), tool_call_id=c.id) for c in parsed.turn.calls]
        if not calls or draw(st.booleans()):
            role = draw(st.sampled_from(["user", "user", "system"]))
            turns.append(Turn(role, draw(ordinary)))  # type: ignore[arg-type]
    return turns


def block_of(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def body_of(turn: Turn) -> str:
    """An assistant turn as the templates write it."""
    calls = [
        block_of(
            json.dumps({"name": c.name, "arguments": json.loads(c.arguments)}, ensure_ascii=False)
        )
        for c in turn.calls
    ]
    return "\n".join([*([turn.text] if turn.text else []), *calls])


def as_message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {"function": {"name": c.name, "arguments": json.loads(c.arguments)}} for c in turn.calls
        ]
    return message


@functools.cache
def raw_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@both
@given(turns=conversations(), with_tools=st.booleans())
@settings(max_examples=80)
def test_spliced_prompt_equals_the_template_on_a_fresh_conversation(
    codec_of: Codec, folder_of: Folder, turns: list[Turn], with_tools: bool
) -> None:
    """Turn after turn, as an episode goes, with completions that say what the template would."""
    codec = codec_of()
    tools = [LOOK] if with_tools else []
    sampled = SampledTurns()
    for index, turn in enumerate(turns):
        if turn.role != "assistant":
            continue
        prompt = compose(codec, sampled, turns[:index], tools)
        ids = codec.encode_rendered(body_of(turn) + codec.end_of_turn)
        sampled.add(KnownTurn(f"c{index}", index, turn, ids, prompt.history, prompt.continues))
    prompt = compose(codec, sampled, turns, tools)
    assert len(prompt.spans) == sum(turn.role == "assistant" for turn in turns)
    assert not prompt.causes
    expected = codec.template_text([as_message(turn) for turn in turns], tools)
    assert codec.decode(prompt.ids) == codec.decode(raw_tokenizer(folder_of()).encode(expected).ids)
    assert prompt.ids.tolist() == raw_tokenizer(folder_of()).encode(expected).ids


@both
@given(text=ordinary)
def test_text_round_trips(codec_of: Codec, folder_of: Folder, text: str) -> None:
    codec = codec_of()
    raw = raw_tokenizer(folder_of())
    ids = codec.encode_text(text)
    assert ids.tolist() == raw.encode(text, add_special_tokens=False).ids
    assert codec.decode(ids) == raw.decode(ids.tolist(), skip_special_tokens=False)


@both
@given(
    pieces=st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<tool_call>", "</think>", "\ufdd0", "x"]),
        max_size=6,
    ),
    role=st.sampled_from(["system", "user", "tool"]),
)
def test_content_never_makes_added_tokens(
    codec_of: Codec, folder_of: Folder, pieces: list[str], role: Any
) -> None:
    codec = codec_of()
    text = "a" + "".join(pieces) + "z"
    base = [Turn("user", "u"), Turn("assistant", "v")]
    with_text = codec.render_fresh([*base, Turn(role, text)])
    without = codec.render_fresh([*base, Turn(role, "az")])
    added = np.asarray(list(codec._added_text))
    assert np.isin(with_text, added).sum() == np.isin(without, added).sum()
    assert text in codec.decode(with_text)


def test_qwen3_encodes_the_known_ambiguous_ids() -> None:
    """A3: ids that the model may sample and that its tokenizer would never give back."""
    codec = qwen3_codec()
    text = codec.decode([53122, 316])
    assert codec.encode_text(text).tolist() == [393, 30002]


def test_qwen3_special_tokens() -> None:
    codec = qwen3_codec()
    assert codec.stop_ids == (151645, 151643)
    assert not codec.opens_thinking
    ids = codec.render_fresh([{"role": "user", "content": "Hi"}])
    assert ids.tolist() == [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198]


def test_qwen3_tool_results_share_a_user_turn() -> None:
    turns = [Turn("tool", "one"), Turn("tool", "two")]
    assert qwen3_codec().render(later(turns)).text == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_that_the_template_leaves_out_is_a_named_cause() -> None:
    turns = [Turn("user", "u"), Turn("assistant", "v", thinking="deep"), Turn("user", "w")]
    prompt = compose(qwen3_codec(), SampledTurns(), turns, [])
    assert prompt.causes == ("foreign turn", "thinking left out by the template")


def later(turns: list[Turn]) -> Stretch:
    """Turns that follow a sampled one."""
    return Stretch(tuple(turns), first=False)


def codec_with(template: str) -> ChatCodec:
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    return ChatCodec((TINY / "tokenizer.json").read_text(), config, template)


CHATML = (
    "{% for m in messages %}{% if m.role in ROLES %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_role_that_the_template_drops_fails_loudly() -> None:
    complete = CHATML.replace("ROLES", "['user', 'assistant', 'system', 'tool']")
    assert "obey" in codec_with(complete).render(later([Turn("system", "obey")])).text
    silent = CHATML.replace("ROLES", "['user', 'assistant', 'tool'] or loop.first")
    with pytest.raises(RequestFault, match="missing in the rendering"):
        codec_with(silent).render(later([Turn("system", "obey")]))


def test_a_template_that_depends_on_what_came_before_is_refused() -> None:
    counted = CHATML.replace("{{ m.content }}", "{{ loop.index }} {{ m.content }}")
    with pytest.raises(ConfigError, match="differently"):
        codec_with(counted.replace("ROLES", "['user', 'assistant', 'system', 'tool']"))


def test_later_segments_cost_the_same_whatever_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new text is encoded, counted in characters that reach the tokenizer."""
    codec = ChatCodec.from_folder(TINY)
    encoded: list[int] = []
    encode = codec.encode_rendered
    monkeypatch.setattr(
        codec,
        "encode_rendered",
        lambda text, mark="": encoded.append(len(text)) or encode(text, mark),
    )
    sampled = SampledTurns()
    turns = [Turn("user", "word " * 200)]
    for index in range(6):
        prompt = compose(codec, sampled, turns, [])
        answer = Turn("assistant", f"answer {index}")
        ids = encode(answer.text + codec.end_of_turn)
        sampled.add(KnownTurn(f"c{index}", index, answer, ids, prompt.history, prompt.continues))
        turns += [answer, Turn("user", f"next {index}")]
    assert encoded[0] > 1000 and max(encoded[1:]) < 80

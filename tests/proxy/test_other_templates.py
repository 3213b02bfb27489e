"""Tokenizer folders that are not Qwen3's: those with tools work, the others say why not."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import pytest
import tokenizers

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy import ChatCodec
from clawgym_jax.proxy.splice import KnownTurn, SampledTurns, compose
from clawgym_jax.proxy.template_form import message_of
from clawgym_jax.proxy.turns import ToolCall, Turn
from tests.proxy.qwen3 import tokenizer_folder
from tests.proxy.support import LOOK, TINY

CALL = ToolCall("call1", "look", '{"path": "in/a b.txt"}')
TALK = (
    Turn("system", "Be brief."),
    Turn("user", "What is in a b.txt? Say <|im_end|> and <|eot_id|> if you must."),
    Turn("assistant", "", (CALL,)),
    Turn("tool", "naïve 🙂 text", tool_call_id="call1"),
    Turn("assistant", "It says so."),
    Turn("user", "Thanks."),
)


@functools.cache
def codec_of(model: str) -> ChatCodec:
    return ChatCodec.from_folder(tokenizer_folder(model))


@pytest.mark.parametrize("model", ["llama3_1", "qwen2_5"])
def test_a_spliced_prompt_is_the_templates_text(model: str) -> None:
    """Sampled turns say what the template would; then every prompt is the template's, id for id."""
    codec = codec_of(model)
    sampled = SampledTurns()
    plain = tuple(msgspec.structs.replace(turn, text=turn.text.replace("|", "")) for turn in TALK)
    for index, turn in enumerate(plain):
        prompt = compose(codec, sampled, plain[:index], [LOOK]) if index > 1 else None
        if prompt is not None:
            text = codec.template_text([message_of(t, str) for t in plain[:index]], [LOOK])
            raw = tokenizers.Tokenizer.from_file(str(tokenizer_folder(model) / "tokenizer.json"))
            assert prompt.ids.tolist() == raw.encode(text, add_special_tokens=False).ids
        if turn.role == "assistant":
            assert prompt is not None
            before, after = (
                codec.template_text([message_of(t, str) for t in plain[:end]], [LOOK], generate)
                for end, generate in ((index, True), (index + 1, False))
            )
            said = after.removeprefix(before).rstrip("\n")
            ids = codec.encode_rendered(said)
            assert ids[-1] == codec.end_of_turn_id
            known = KnownTurn(f"c{index}", index, turn, ids, prompt.history, prompt.continues)
            sampled.add(known)
    last = compose(codec, sampled, plain, [LOOK])
    assert len(last.spans) == 2 and not last.causes


@pytest.mark.parametrize("model", ["llama3_1", "qwen2_5"])
def test_special_tokens_in_content_stay_text(model: str) -> None:
    codec = codec_of(model)
    ids = codec.render_fresh(TALK[:2], [LOOK])
    turns = ids.tolist().count(codec.end_of_turn_id)
    assert turns == 2  # of the system turn and of the user's, none of the text's
    assert "Say <|im_end|> and <|eot_id|> if" in codec.decode(ids)


def test_a_template_without_tools_says_so(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match=r"tool calls.*roles must alternate"):
        ChatCodec.from_folder(tmp_path)


def test_qwen3_without_thinking_appends_and_answers_in_plain_text() -> None:
    """The empty reasoning that the template opens with is part of every generation prompt."""
    codec = ChatCodec.from_folder(tokenizer_folder("qwen3"), {"enable_thinking": False})
    sampled = SampledTurns()
    first = compose(codec, sampled, TALK[:2], [LOOK])
    assert codec.decode(first.ids).endswith("<think>\n\n</think>\n\n")
    said = codec.encode_rendered("It says so.<|im_end|>")
    turn = Turn("assistant", "It says so.")
    sampled.add(KnownTurn("c0", 0, turn, said, first.history, first.continues))
    second = compose(codec, sampled, (*TALK[:2], turn, TALK[-1]), [LOOK])
    start = [*first.ids.tolist(), *said.tolist()]
    assert second.ids.tolist()[: len(start)] == start

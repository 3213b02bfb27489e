"""Proves, when a tokenizer folder is loaded, that parts of a conversation render as the whole does.

A conversation with every kind of turn is rendered in one piece by the model's own template, and
in the pieces that the proxy will render; the pieces must follow one another in the whole. A
template may open a turn that is to be sampled (an empty reasoning block, say): that belongs to the
generation prompt and is not looked for in the turns that are history.
Not here: rendering (chat_template.py). Invariant: a template that gets through here appends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.rendering import Stretch
from clawgym_jax.proxy.template_form import message_of
from clawgym_jax.proxy.turns import ToolCall, Turn

if TYPE_CHECKING:
    from clawgym_jax.proxy.chat_template import ChatCodec

_CALL = ToolCall("c", "look", '{"path": "a b"}')
_TURNS = (
    Turn("system", "be brief"),
    Turn("user", "first"),
    Turn("assistant", "", (_CALL,)),
    Turn("tool", "one", tool_call_id="c"),
    Turn("tool", "two", tool_call_id="c"),
    Turn("assistant", "seen", (_CALL,)),
    Turn("tool", "three", tool_call_id="c"),
    Turn("user", "and"),
)
_TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
_SAID = "said0before"


def last_text_of(codec: ChatCodec) -> str:
    """The whole conversation with its generation prompt; raises ConfigError where parts differ."""
    whole = codec.template_text([message_of(turn, str) for turn in _TURNS], _TOOLS)
    stretches = (
        Stretch(_TURNS[:2], _TOOLS),
        Stretch(_TURNS[3:5], first=False),
        Stretch(_TURNS[6:], first=False),
    )
    parts = [codec.render(stretch).text for stretch in stretches]
    opening = _opening(codec)
    parts = [*(part.removesuffix(opening) for part in parts[:-1]), parts[-1]]
    position = 0
    for part in parts:
        found = whole.find(part, position)
        if found < 0 or (position == 0 and found != 0):
            raise ConfigError(
                "the chat template renders a later part of a conversation differently from "
                f"the same part alone; expected {part!r} in {whole!r}"
            )
        position = found + len(part)
    if position != len(whole):
        raise ConfigError(f"the chat template adds {whole[position:]!r} at the end")
    return whole


def _opening(codec: ChatCodec) -> str:
    """What the template puts at the start of a turn to be sampled, but not of one that was."""
    user, said = {"role": "user", "content": "-"}, {"role": "assistant", "content": _SAID}
    before = codec.template_text([user], (), False)
    asked = codec.template_text([user]).removeprefix(before)
    shown = codec.template_text([user, said, user], (), False).partition(_SAID)[0]
    header = shown.removeprefix(before)
    return asked.removeprefix(header) if asked.startswith(header) else ""

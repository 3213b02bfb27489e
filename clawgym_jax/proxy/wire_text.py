"""Small readers that all protocols need: text of contents, checked fields.

Invariant: content that is not text is an error, never skipped: what a message carries must reach
the model or the request fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import Turn

_BILLING = "x-anthropic-billing-header:"
_MAX_DEPTH = 8
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "max_tokens",
    "max_completion_tokens", "tool_choice", "parallel_tool_calls", "thinking", "reasoning_effort",
    "frequency_penalty", "presence_penalty", "logit_bias", "n", "response_format", "output_config",
    "max_output_tokens", "reasoning", "text", "truncation", "verbosity",
)  # fmt: skip


def require(body: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise invalid(f'"{name}" to be {what}', value)
    return value


def optional_list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f'"{name}" to be a list', value)
    return value


def optional_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f'"{name}" to be a string', value)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(f'"{name}" to be true or false', value)


def named(form: Any, what: str) -> Mapping[str, Any]:
    """A form that has a name."""
    if not isinstance(form, dict) or not isinstance(form.get("name"), str) or not form["name"]:
        raise invalid(f"{what} with a name", form)
    return form


def flat_text(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a string or of a list of text blocks; blocks are joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("content as a string or a list of blocks", content)
    return "\n".join(block_text(block, kinds) for block in content)


def block_text(block: Any, kinds: Sequence[str] = ("text",)) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, dict) else None
    text = block.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
    if not isinstance(text, str):
        raise invalid(
            f"a block of type {' or '.join(kinds)} with text",
            kind if kind else block,
            "the model reads text only: leave out images, audio and files",
        )
    return text


def without_billing(texts: Iterable[str]) -> str:
    """System text without the accounting line that changes from call to call."""
    kept = []
    for text in texts:
        first, _, rest = text.partition("\n")
        if first.lstrip().lower().startswith(_BILLING):
            text = rest.lstrip("\n")
        if text:
            kept.append(text)
    return "\n".join(kept)


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The first token limit that is given, or None."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(f'"{name}" to be a positive integer', value)
        return value
    return None


def strings_of(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings: one, a list or none."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise invalid(f'"{name}" to be a string or a list of strings', value)
    return tuple(item for item in values if item)


def sampling_asked(body: Mapping[str, Any], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Sampling fields as asked, in a form that a record can hold.

    left_out: kinds of tools that only the protocol's own maker can serve.
    """
    asked = {name: _storable(body[name]) for name in _SAMPLING_FIELDS if name in body}
    return {**asked, "tools_left_out": list(left_out)} if left_out else asked


def _storable(value: Any, depth: int = 0) -> Any:
    """Integers beyond 64 bits and what is nested too deep become text."""
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if depth == _MAX_DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, dict):
        return {key: _storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_storable(item, depth + 1) for item in value]
    return value


def require_turns(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    if not any(turn.role != "system" for turn in turns):
        raise invalid("at least one message besides system text", "none")
    return tuple(turns)

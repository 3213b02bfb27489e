"""Token ids of conversations, by the model's own chat template and tokenizer.

Where the boundary is: rendered text is cut at the *added tokens that the template itself wrote*
(<|im_start|>, <tool_call>, ...). Each of them is its id; the text between two of them is encoded
in one piece, with no added token recognised in it. So merges across the seam of template and
content happen exactly as in the model's own encoding of the whole text, while an `<|im_end|>`
inside a message is plain text. To tell the two apart, an added token's text inside content is
broken by a noncharacter before rendering, and mended before encoding.

A later part of a conversation (`segment`) is rendered behind a stand-in for the assistant turn
that precedes it, by the same template: its cost does not depend on the history. `self_check`
proves at load time that this equals the template on a whole conversation.
Not here: which turns are spliced (splice.py). Source: the templates' Hugging Face conventions.
Invariant: a text that a turn carries is in the rendering, or `RequestFault` is raised.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.faults import invalid
from clawgym_jax.proxy.turns import ToolCall, Turn

Tools = Sequence[Mapping[str, Any]]
_MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))  # noncharacters: never in real text
_ANCHOR = "anchor0turn"
_CACHE_CHARS = 1 << 25


@dataclass(frozen=True, slots=True)
class Rendering:
    """A stretch of environment text."""

    text: str
    ids: np.ndarray  # i32[N]
    dropped_thinking: bool = False  # the template leaves a turn's reasoning out


class ChatCodec:
    """Encodes and decodes for one model. Not thread-safe."""

    def __init__(
        self,
        tokenizer_json: str,
        config: Mapping[str, Any],
        template: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """options: what the template may be asked besides, such as {"enable_thinking": False}."""
        spec = json.loads(tokenizer_json)
        self._added = _added_tokens(spec)
        self._added_text = {token: text for text, token in self._added.items()}
        self._added_pattern = _pattern_of(self._added)
        spec["added_tokens"] = []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._plain.no_truncation()
        self._plain.no_padding()
        self._template = _compile(template)
        self._variables = {
            name: _token_text(config.get(name)) or ""
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        } | dict(options or {})
        self.end_of_turn = _token_text(config.get("eos_token")) or "<|im_end|>"
        self.end_of_turn_id = self._id_of(self.end_of_turn)
        others = (self._added.get("<|im_end|>"), self._added.get("<|endoftext|>"))
        ends = (self.end_of_turn_id, *others)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.vocab_size = self._plain.get_vocab_size() + len(self._added)
        self._cache = _RenderingCache(_CACHE_CHARS)
        self.opens_thinking = self._self_check().rstrip().endswith("<think>")

    @classmethod
    def from_folder(cls, path: Path | str, options: Mapping[str, Any] | None = None) -> ChatCodec:
        """Reads tokenizer.json, tokenizer_config.json and the template in it or beside it."""
        folder = Path(path)
        try:
            tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder} is no tokenizer folder: expected tokenizer.json and "
                f"tokenizer_config.json, {error.filename} is missing"
            ) from error
        beside = folder / "chat_template.jinja"
        template = beside.read_text(encoding="utf-8") if beside.exists() else None
        template = template or config.get("chat_template")
        if not isinstance(template, str):
            raise ConfigError(
                f'{folder} has no chat template: expected "chat_template" in '
                "tokenizer_config.json or a chat_template.jinja"
            )
        return cls(tokenizer_json, config, template, options)

    # ---- tokens -------------------------------------------------------------------------------

    def encode_text(self, text: str) -> np.ndarray:
        """i32[N]: text as content, in which no added token is recognised."""
        return np.asarray(self._plain.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_rendered(self, text: str, mark: str = "") -> np.ndarray:
        """i32[N]: text as the template writes it, in which added tokens are tokens."""
        ids: list[int] = []
        for index, piece in enumerate(self._added_pattern.split(text)):
            if index % 2:
                ids.append(self._added[piece])
            elif piece:
                mended = piece.replace(mark, "") if mark else piece
                ids.extend(self._plain.encode(mended, add_special_tokens=False).ids)
        return np.asarray(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids, added tokens included."""
        parts: list[str] = []
        run: list[int] = []
        for token in np.asarray(ids).tolist():
            added = self._added_text.get(token)
            if added is None:
                run.append(token)
                continue
            if run:
                parts.append(self._plain.decode(run, skip_special_tokens=False))
                run = []
            parts.append(added)
        if run:
            parts.append(self._plain.decode(run, skip_special_tokens=False))
        return "".join(parts)

    def token_id(self, text: str) -> int:
        """Id of an added token, such as <|im_start|>."""
        return self._id_of(text)

    # ---- conversations ------------------------------------------------------------------------

    def render_fresh(
        self, messages: Sequence[Turn | Mapping[str, Any]], tools: Tools = (), generate: bool = True
    ) -> np.ndarray:
        """i32[N]: a whole conversation with nothing spliced, with the generation prompt."""
        turns = [item if isinstance(item, Turn) else turn_of(item) for item in messages]
        return self._rendering(turns, tools, generate, from_start=True).ids

    def head(self, turns: Sequence[Turn], tools: Tools) -> Rendering:
        """The start of a conversation up to the first sampled turn, generation prompt included."""
        key = ("head", json.dumps(tools), tuple(turns))
        return self._cache.get(key, lambda: self._rendering(turns, tools, True, True))

    def segment(self, turns: Sequence[Turn]) -> Rendering:
        """What follows a closed sampled turn up to the next one, generation prompt included."""
        key = ("segment", "", tuple(turns))
        return self._cache.get(key, lambda: self._rendering(turns, (), True, False))

    def template_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), generate: bool = True
    ) -> str:
        """What the model's own template makes of messages, untouched."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise invalid("messages that the chat template accepts", roles, str(error)) from error

    def _rendering(
        self, turns: Sequence[Turn], tools: Tools, generate: bool, from_start: bool
    ) -> Rendering:
        mark = self._choose_mark(turns, tools)
        escape = self._escaper(mark)
        messages = [_message(turn, escape) for turn in turns]
        if from_start:
            shown = [_map_strings(tool, escape) for tool in tools]
            text = self.template_text(messages, shown, generate)
        else:
            text = self._behind_anchor(messages, generate)
        dropped = _require_present(text, turns, messages)
        clean = text.replace(mark, "") if mark else text
        return Rendering(clean, self.encode_rendered(text, mark), dropped)

    def _behind_anchor(self, messages: list[dict[str, Any]], generate: bool) -> str:
        """Renders messages behind a stand-in assistant turn and returns what follows that turn."""
        stand_in = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANCHOR}]
        text = self.template_text([*stand_in, *messages], (), generate)
        _, found, rest = text.partition(_ANCHOR)
        if not found or not rest.startswith(self.end_of_turn):
            raise ConfigError(
                f"the chat template must close an assistant turn with {self.end_of_turn!r}; "
                f"got {rest[:40]!r}"
            )
        return rest[len(self.end_of_turn) :]

    def _escaper(self, mark: str) -> Callable[[str], str]:
        if not mark:
            return lambda text: text
        return lambda text: self._added_pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)

    def _choose_mark(self, turns: Sequence[Turn], tools: Tools) -> str:
        """A noncharacter that no content holds, or "" where content needs no escaping."""
        texts = [json.dumps(tools, ensure_ascii=False)] if tools else []
        for turn in turns:
            texts += [turn.text, turn.thinking]
            texts += [part for call in turn.calls for part in (call.name, _plain_json(call))]
        if not any("<" in text and self._added_pattern.search(text) for text in texts):
            return ""
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise invalid("text without Unicode noncharacters U+FDD0..U+FDEF", "all of them")

    def _id_of(self, text: str) -> int:
        if text not in self._added:
            raise ConfigError(f"the tokenizer has no added token {text!r}: {sorted(self._added)}")
        return self._added[text]

    def _self_check(self) -> str:
        """Segments must equal the template on a whole conversation; returns the last text."""
        call = ToolCall("c", "look", '{"path": "a b"}')
        turns = [
            Turn("system", "be brief"),
            Turn("user", "first"),
            Turn("assistant", "", (call,)),
            Turn("tool", "one", tool_call_id="c"),
            Turn("tool", "two", tool_call_id="c"),
            Turn("assistant", "seen", (call,)),
            Turn("tool", "three", tool_call_id="c"),
            Turn("user", "and"),
        ]
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        whole = self.template_text([_message(t, str) for t in turns], tools)
        parts = [self._rendering(turns[:2], tools, True, True).text]
        parts += [self._rendering(turns[a:b], (), True, False).text for a, b in ((3, 5), (6, 8))]
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


def turn_of(message: Mapping[str, Any]) -> Turn:
    """A plain {"role", "content", "tool_calls"} message as a turn."""
    calls = []
    for item in message.get("tool_calls") or ():
        function = item.get("function", item)
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ToolCall(str(item.get("id", "")), function["name"], text))
    return Turn(
        message["role"],
        message.get("content") or "",
        tuple(calls),
        str(message.get("tool_call_id", "")),
        message.get("reasoning_content") or "",
    )


def _message(turn: Turn, escape: Callable[[str], str]) -> dict[str, Any]:
    """A turn in the form that chat templates expect."""
    message: dict[str, Any] = {"role": turn.role, "content": escape(turn.text)}
    if turn.thinking:
        message["reasoning_content"] = escape(turn.thinking)
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": _function(call, escape)} for call in turn.calls
        ]
    return message


def _function(call: ToolCall, escape: Callable[[str], str]) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"name": escape(call.name), "arguments": _map_strings(arguments, escape)}


def _plain_json(call: ToolCall) -> str:
    """Arguments without \\u escapes, which could hide an added token."""
    arguments = _function(call, str)["arguments"]
    return arguments if isinstance(arguments, str) else _to_json(arguments)


def _require_present(
    text: str, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Raises where the template dropped a text; returns whether it dropped reasoning."""
    position = 0
    dropped_thinking = False
    for turn, message in zip(turns, messages, strict=True):
        wanted = [message["content"].strip()]
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            wanted += [call["function"]["name"]]
            wanted += [arguments if isinstance(arguments, str) else _to_json(arguments)]
        start = position
        for piece in filter(None, wanted):
            found = text.find(piece, position)
            if found < 0:
                raise invalid(
                    f"a chat template that renders every {turn.role} turn",
                    piece,
                    "this text is missing in the rendering: use a template with that role",
                )
            position = found + len(piece)
        thinking = message.get("reasoning_content", "").strip()
        dropped_thinking |= bool(thinking) and thinking not in text[start:position]
    return dropped_thinking


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {function(str(k)): _map_strings(v, function) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


def _added_tokens(spec: Mapping[str, Any]) -> dict[str, int]:
    """Added tokens by text. Those that swallow neighbouring text are refused."""
    added: dict[str, int] = {}
    for token in spec.get("added_tokens", ()):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ConfigError(
                f"added token {token['content']!r} strips or needs word boundaries; "
                "expected plain added tokens as Qwen3 has them"
            )
        added[token["content"]] = token["id"]
    return added


def _pattern_of(added: Mapping[str, int]) -> re.Pattern[str]:
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def _token_text(token: Any) -> str | None:
    """Configurations write a token as text or as {"content": text}."""
    return token.get("content") if isinstance(token, Mapping) else token


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", False), indent=indent)


def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


class _RenderingCache:
    """Recent renderings: the episodes of a group start with the same text."""

    def __init__(self, budget_chars: int) -> None:
        self._budget_chars = budget_chars
        self._used_chars = 0
        self._entries: OrderedDict[Any, Rendering] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Rendering]) -> Rendering:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry
        entry = make()
        entry.ids.setflags(write=False)
        self._entries[key] = entry
        self._used_chars += len(entry.text)
        while self._used_chars > self._budget_chars and len(self._entries) > 1:
            _, old = self._entries.popitem(last=False)
            self._used_chars -= len(old.text)
        return entry

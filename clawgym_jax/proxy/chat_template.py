"""Token ids of conversations, by the model's own chat template and tokenizer.

Where the boundary is: rendered text is cut at the *added tokens that the template itself wrote*
(<|im_start|>, <tool_call>, ...). Each of them is its id; the text between two of them is encoded
in one piece, with no added token recognised in it. So merges across the seam of template and
content happen exactly as in the model's own encoding of the whole text, while an `<|im_end|>`
inside a message is plain text. To tell the two apart, an added token's text inside content is
broken by a noncharacter before rendering, and mended before encoding.

A later part of a conversation (`segment`) is rendered behind a stand-in for the assistant turn
that precedes it, by the same template: its cost does not depend on the history. `template_check`
proves at load time that this equals the template on a whole conversation.
Not here: which turns are spliced (splice.py). Source: the templates' Hugging Face conventions.
Invariant: a text that a turn carries is in the rendering, or `RequestFault` is raised.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.faults import RequestFault, invalid
from clawgym_jax.proxy.rendering import LongPieces, Rendering, RenderingCache, Stretch
from clawgym_jax.proxy.template_check import last_text_of
from clawgym_jax.proxy.template_form import (
    arguments_text,
    compile_template,
    map_strings,
    message_of,
    require_present,
    turn_of,
)
from clawgym_jax.proxy.turns import Turn

# The tokenizer's own threads would bring nothing for single texts, and it warns at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Tools = Sequence[Mapping[str, Any]]
_MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))  # noncharacters: never in real text
ANCHOR = "anchor0turn"
_LONG_CHARS = 4096
_LONG_PIECES_CHARS = 1 << 24
_CACHE_TOK = 1 << 24  # 64 MiB of ids


class ChatCodec:
    """Encodes and decodes for one model. Only `cache` is not for every thread."""

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
        self._added_ids = {text: np.asarray([i], np.int32) for text, i in self._added.items()}
        self._long_pieces = LongPieces(_LONG_PIECES_CHARS)
        self._added_text = {token: text for text, token in self._added.items()}
        self._added_pattern = _pattern_of(self._added)
        spec["added_tokens"] = []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._plain.no_truncation()
        self._plain.no_padding()
        self._template = compile_template(template)
        self._variables = {
            name: _token_text(config.get(name)) or ""
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        } | dict(options or {})
        self.end_of_turn = _token_text(config.get("eos_token")) or "<|im_end|>"
        self.end_of_turn_id = self._id_of(self.end_of_turn)
        others = (self._added.get("<|im_end|>"), self._added.get("<|endoftext|>"))
        ends = (self.end_of_turn_id, *others)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.longest_token_chars = max(map(len, self._plain.get_vocab()))  # a byte is a character
        self.vocab_size = self._plain.get_vocab_size() + len(self._added)
        self.cache = RenderingCache(_CACHE_TOK)
        try:
            self.opens_thinking = last_text_of(self).rstrip().endswith("<think>")
        except RequestFault as fault:
            raise ConfigError(
                f"the chat template cannot carry tool calls and their results: {fault}; use a "
                "model whose template has the roles system, user, assistant and tool"
            ) from fault

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
        if len(text) < _LONG_CHARS:
            encoding = self._plain.encode(text, add_special_tokens=False)
        else:  # only in a batch does the tokenizer let other threads run meanwhile
            (encoding,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32)

    def encode_rendered(self, text: str, mark: str = "") -> np.ndarray:
        """i32[N]: text as the template writes it, in which added tokens are tokens."""
        parts: list[np.ndarray] = []
        for index, piece in enumerate(self._added_pattern.split(text)):
            if index % 2:
                parts.append(self._added_ids[piece])
            elif piece:
                parts.append(self._encode_piece(piece.replace(mark, "") if mark else piece))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _encode_piece(self, text: str) -> np.ndarray:
        if len(text) < _LONG_CHARS:
            return self.encode_text(text)
        return self._long_pieces.get(text, self.encode_text)

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

    @property
    def turn_start_id(self) -> int:
        """The added token that this template starts a turn with."""
        first = self.template_text([{"role": "user", "content": "-"}], generate=False)
        found = self._added_pattern.search(first)
        if found is None:
            raise ConfigError(f"the chat template starts turns with no added token: {first!r}")
        return self._added[found[0]]

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

    def render(self, stretch: Stretch) -> Rendering:
        """A stretch with the generation prompt behind it; from any thread.

        The first of a conversation starts with the tools; a later one follows a closed sampled
        turn, and its cost does not depend on what came before.
        """
        return self._rendering(stretch.turns, stretch.tools, True, stretch.first)

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
        messages = [message_of(turn, escape) for turn in turns]
        if from_start:
            shown = [map_strings(tool, escape) for tool in tools]
            text = self.template_text(messages, shown, generate)
        else:
            text = self._behind_anchor(messages, generate)
        dropped = require_present(text, turns, messages)
        clean = text.replace(mark, "") if mark else text
        return Rendering(clean, self.encode_rendered(text, mark), dropped)

    def _behind_anchor(self, messages: list[dict[str, Any]], generate: bool) -> str:
        """Renders messages behind a stand-in assistant turn and returns what follows that turn."""
        stand_in = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANCHOR}]
        text = self.template_text([*stand_in, *messages], (), generate)
        _, found, rest = text.partition(ANCHOR)
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
            texts += [part for call in turn.calls for part in (call.name, arguments_text(call))]
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

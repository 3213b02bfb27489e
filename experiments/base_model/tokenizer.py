"""Builds the tiny model's byte-level BPE tokenizer and its files.

Vocabulary, in id order: 256 bytes; open syllables ("ba") and closed ones ("ban"), the only
learned-looking merges; the closed lists of `vocabulary`; nine added tokens like Qwen3's.
Pre-tokens that are in the vocabulary as a whole are one token (`ignore_merges`); everything
else falls apart into syllables, letters and bytes, so any text round-trips.

Invariant: the pre-tokenizer puts a run of letters that is no listed word into a pre-token of
its own, hence a name's tokens do not depend on what stands before it.
Not a general tokenizer: English outside the word list costs about two letters a token.
"""

import json
import pathlib
import re
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from clawgym_jax.core import names
from experiments.base_model import vocabulary

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip

# Qwen3's style, our text: short, because the context is 1,024 tokens.
CHAT_TEMPLATE = r"""
{%- set ns = namespace(open=false) %}
{%- set first = messages[0] if messages else none %}
{%- set system = first.content if first and first.role == 'system' else none %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if system %}{{- system }}{% endif %}
    {%- if tools %}
        {%- if system %}{{- '\n\n' }}{% endif %}
        {{- '# Tools\n<tools>\n' }}
        {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
        {{- '</tools>\nCalls are written as <tool_call>\n' }}
        {{- '{"name": ..., "arguments": ...}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if not ns.open %}{{- '<|im_start|>user\n' }}{% else %}{{- '\n' }}{% endif %}
        {%- set ns.open = true %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
            {%- set ns.open = false %}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n' }}
        {%- endif %}
        {%- if message.content %}{{- message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if message.content or not loop.first %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}{{- function.arguments }}
            {%- else %}{{- function.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') or not message.content %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()


def build() -> tokenizers.Tokenizer:
    """The tokenizer, byte-identical at every call."""
    syllables, merges = _syllables_and_merges()
    added = SPECIAL_TOKENS + ADDED_TOKENS
    vocab: dict[str, int] = {}
    for piece in [*_byte_alphabet(), *syllables, *_closed_list()]:
        if piece not in vocab and len(vocab) < VOCAB_SIZE - len(added):
            vocab[piece] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t in ADDED_TOKENS]
    )
    if (size := tokenizer.get_vocab_size()) != VOCAB_SIZE:
        raise ValueError(f"vocabulary: expected {VOCAB_SIZE} tokens, got {size}: adjust WORDS")
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _syllables_and_merges() -> tuple[list[str], list[tuple[str, str]]]:
    """Open syllables merge before closed ones, which makes the cut of a name unique."""
    opened = [(c, v) for c in names.CONSONANTS for v in names.VOWELS]
    closed = [(c + v, f) for c, v in opened for f in names.FINALS]
    merges = opened + closed
    return [a + b for a, b in merges], merges


def _closed_list() -> list[str]:
    """Listed strings in the byte alphabet's spelling (a space is 'Ġ', a newline 'Ċ')."""
    pieces = [*vocabulary.PUNCTUATION, *vocabulary.EXTENSIONS, *vocabulary.WORDS]
    for word in vocabulary.WORDS:
        if names.NAME_PATTERN.fullmatch(word.strip()) and word.strip() not in names.RESERVED:
            raise ValueError(f"{word!r} has the shape of a name: add it to names.RESERVED")
    return [p.replace(" ", "Ġ").replace("\n", "Ċ") for p in pieces]


def _pattern() -> str:
    """One regular expression; the first alternative that matches at a position wins."""
    extensions = "|".join(re.escape(e) for e in vocabulary.EXTENSIONS)
    punctuation = "|".join(_escape(p) for p in _longest_first(vocabulary.PUNCTUATION))
    words = "|".join(_longest_first({w.strip() for w in vocabulary.WORDS}))
    spaced = "|".join(_longest_first({w[1:] for w in vocabulary.WORDS if w[0] == " "}))
    return "|".join(
        [
            punctuation,
            f"(?:{extensions})(?![A-Za-z_])",
            f" (?:{spaced})(?![A-Za-z_])",
            f"(?<![A-Za-z_])(?:{words})(?![A-Za-z_])",
            "[A-Za-z]+",
            r"[\s\S]",
        ]
    )


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _escape(text: str) -> str:
    return re.escape(text).replace("\\\n", "\n")

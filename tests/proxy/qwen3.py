"""Real tokenizers and chat templates: Qwen3's, and others'."""

from __future__ import annotations

import functools
from pathlib import Path

from clawgym_jax.proxy import ChatCodec
from experiments.npm_tokenizer import npm_tokenizer
from tests.conftest import require


@functools.cache
def tokenizer_folder(model: str) -> Path:
    folder = npm_tokenizer(model)
    require(isinstance(folder, Path), str(folder))
    assert isinstance(folder, Path)
    return folder


def qwen3_folder() -> Path:
    return tokenizer_folder("qwen3")


@functools.cache
def qwen3_codec() -> ChatCodec:
    return ChatCodec.from_folder(qwen3_folder())

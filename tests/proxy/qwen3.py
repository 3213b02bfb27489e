"""The real Qwen3 tokenizer and chat template as a codec."""

from __future__ import annotations

import functools
from pathlib import Path

from clawgym_jax.proxy import ChatCodec
from experiments.qwen3_tokenizer import qwen3_tokenizer
from tests.conftest import require


@functools.cache
def qwen3_folder() -> Path:
    folder = qwen3_tokenizer()
    require(isinstance(folder, Path), str(folder))
    assert isinstance(folder, Path)
    return folder


@functools.cache
def qwen3_codec() -> ChatCodec:
    return ChatCodec.from_folder(qwen3_folder())

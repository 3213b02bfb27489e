"""The interpreters of contestants that do not belong into the project's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = ("torch==2.13.0", "transformers==5.24.0")
ENVIRONMENT = Path(__file__).resolve().parents[3] / ".cache" / "torch"


def torch(named: str | None, install: bool) -> Path | None:
    """One that has torch and transformers; None where there is none and none may be installed."""
    if named:
        return Path(named)
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists() and install:
        print(f"installing {', '.join(TORCH)} into {ENVIRONMENT}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, TORCH[0]], check=True)
        subprocess.run([*pip, *TORCH[1:]], check=True)
    return python if python.exists() else None


def has_jetstream() -> bool:
    """Whether the extra "jetstream" is installed here. Not imported: that takes seconds."""
    import importlib.util

    return importlib.util.find_spec("jetstream") is not None

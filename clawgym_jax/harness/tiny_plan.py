"""How the two built-in programs are started: their files in HOME, their settings as JSON.

Invariant: a plan depends only on its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan

_PROGRAMS = Path(__file__).parent / "programs"
Settings = Mapping[str, str | int | float | bool]


def tiny_plan(
    program: str,
    endpoint: Endpoint,
    instruction: str,
    home: str,
    settings: Settings,
) -> LaunchPlan:
    """programs/`program`.py with `settings`; python3 in the sandbox is all that it needs."""
    folder = f".{program}"
    config = {"model": endpoint.model, "max_tokens": endpoint.max_tok, **settings}
    return LaunchPlan(
        argv=["python3", "-I", "-S", f"{home}/{folder}/agent.py", instruction],
        env={"HOME": home, f"{program.upper()}_KEY": endpoint.key},
        files={
            f"{folder}/agent.py": (_PROGRAMS / f"{program}.py").read_bytes(),
            f"{folder}/tiny_http.py": (_PROGRAMS / "tiny_http.py").read_bytes(),
            f"{folder}/config.json": json.dumps(config).encode(),
        },
    )

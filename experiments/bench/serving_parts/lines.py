"""Commands to a process and its answers: one JSON object a line, over its standard streams.

Standard library only: contestants may live in environments of their own.
Invariant: nothing but answers reaches the reader; what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Worker:
    """The side that commands. Use as a context manager."""

    def __init__(self, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """What it says of itself once it has started."""
        return self._answer()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"a contestant ended with exit code {code}; see what it printed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def answers() -> Callable[[dict[str, Any]], None]:
    """The side that obeys: sends an answer. From here on everything printed is an aside."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return send

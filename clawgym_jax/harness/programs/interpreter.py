"""Runs pieces of Python one after another in one namespace: the agent loop's code interpreter.

    python3 -u interpreter.py     in the workspace; one JSON line in, one JSON line out

{"code": "..."} is answered by {"output": "..."}: what the code and its children wrote to standard
output and error, and the value of its last line if that is an expression. Variables stay.
Invariant: what the code prints never reaches the line protocol.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import traceback

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

KEPT = 200_000  # characters; the agent loop shows fewer


def run(code: str, names: dict[str, Any]) -> None:
    """Executes `code`; the value of a last expression is printed, as at a prompt."""
    tree = ast.parse(code, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
        if value is not None:
            print(repr(value))


def captured(code: str, names: dict[str, Any]) -> str:
    """What `code` printed, its traceback included, from this process and its children."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            run(code, names)
        except SystemExit as end:
            print(f"exit {end.code}")
        except BaseException:
            kind, error, trace = sys.exc_info()
            inside = trace
            while inside is not None and inside.tb_frame.f_code.co_filename == __file__:
                inside = inside.tb_next  # the model did not write these frames
            traceback.print_exception(kind, error, inside, file=sys.stdout)
        sys.stdout.flush()
        sys.stderr.flush()
        file.seek(0)
        return file.read(4 * KEPT).decode("utf-8", "replace")[:KEPT]


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[0] = ""  # the workspace, not this program's folder
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in requests:
        answers.write(json.dumps({"output": captured(json.loads(line)["code"], names)}) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The agent loop's own tools: bash, python, files, and search and fetch over a folder of texts.

Lies beside agent.py in the sandbox; standard library only. Every tool takes checked arguments and
returns text; what goes wrong is text as well. Not here: tools of MCP servers (`mcp_client`).
Invariant: a tool returns within its time limit, and its text within its length limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile

from corpus import Corpus  # type: ignore[import-not-found]

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
LINES = 400  # of a file that read_file shows at once
LISTED = 200  # names that list_files shows
KINDS = {"string": str, "integer": int}


class Tool:
    """What the model is told of a tool, and the function behind it."""

    def __init__(
        self,
        function: Callable[..., str],
        description: str,
        required: dict[str, tuple[str, str]],
        optional: dict[str, tuple[str, str]] | None = None,
    ) -> None:
        self.name = function.__name__
        self.run = function
        properties = {
            key: {"type": kind, "description": text}
            for key, (kind, text) in {**required, **(optional or {})}.items()
        }
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": [*required],
        }
        self.description = description

    def fault(self, arguments: dict[str, Any]) -> str:
        """What is wrong with the arguments; empty if nothing is."""
        known = self.parameters["properties"]
        for key in self.parameters["required"]:
            if key not in arguments:
                return f"{self.name}: {key!r} is missing"
        for key, value in arguments.items():
            if key not in known:
                return f"{self.name}: no argument {key!r}, expected {', '.join(known)}"
            kind = KINDS[known[key]["type"]]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                return f"{self.name}: {key!r} must be of type {known[key]['type']}"
        return ""


class Tools:
    """The tools, with the state that some of them keep."""

    def __init__(self, timeout_s: float, shown: int, corpus: str) -> None:
        self._timeout_s = timeout_s
        self._shown = shown
        self._interpreter: subprocess.Popen[bytes] | None = None
        self._corpus = Corpus(corpus) if corpus else None

    def offered(self) -> list[Tool]:
        path = ("string", "Path, absolute or relative to the working folder")
        found = [
            Tool(self.bash, "Run a shell command.", {"command": ("string", "The command")}),
            Tool(
                self.python,
                "Run Python code in a session that keeps its variables; shows what it prints "
                "and the value of the last line.",
                {"code": ("string", "The code")},
            ),
            Tool(
                self.read_file,
                "Read a text file.",
                {"path": path},
                {"first_line": ("integer", "Where to begin, from 1; default 1")},
            ),
            Tool(
                self.write_file,
                "Create or replace a file.",
                {"path": path, "content": ("string", "The whole content")},
            ),
            Tool(
                self.edit_file,
                "Replace a text that occurs exactly once in a file.",
                {"path": path, "old": ("string", "What is there"), "new": ("string", "Its place")},
            ),
            Tool(self.list_files, "List a folder and all below it.", {}, {"path": path}),
        ]
        if self._corpus is not None:
            found += [
                Tool(
                    self.search,
                    "Search the documents; returns the best passages and where they are.",
                    {"query": ("string", "Words to look for")},
                    {"limit": ("integer", "How many; default 5")},
                ),
                Tool(
                    self.fetch,
                    "Read a document that search named, a page at a time.",
                    {"name": ("string", "The document")},
                    {"offset": ("integer", "Where to begin, in characters; default 0")},
                ),
            ]
        return found

    def cut(self, text: str) -> str:
        """Beginning and end of a text that is too long."""
        if len(text) <= self._shown:
            return text
        half = self._shown // 2
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"

    def bash(self, command: str) -> str:
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = f"exit status {process.wait(self._timeout_s)}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {self._timeout_s:g} s"
                _kill(process)
            text = self._ends_of(output).rstrip("\n")
        if status != "exit status 0":
            text = f"{text}\n{status}"
        return text.strip("\n") or "done, no output"

    def python(self, code: str) -> str:
        if self._interpreter is None or self._interpreter.poll() is not None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-u", os.path.join(HERE, "interpreter.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        reader, writer = self._interpreter.stdout, self._interpreter.stdin
        assert reader is not None and writer is not None
        try:
            writer.write(json.dumps({"code": code}).encode() + b"\n")
            writer.flush()
            ready = select.select([reader], [], [], self._timeout_s)[0]
            line = reader.readline() if ready else b""
        except OSError:
            ready, line = [reader], b""
        if not line:
            self.close()
            why = "it ended" if ready else f"stopped after {self._timeout_s:g} s"
            return f"{why}; the session is new and its variables are gone"
        return str(json.loads(line)["output"]).rstrip("\n") or "done, no output"

    def read_file(self, path: str, first_line: int = 1) -> str:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines(keepends=True)
        start = max(1, first_line) - 1
        shown = lines[start : start + LINES]
        end = start + len(shown)
        note = f"\n[lines {start + 1}-{end} of {len(lines)}; go on with first_line={end + 1}]"
        return ("".join(shown).rstrip("\n") or "empty") + (note if end < len(lines) else "")

    def write_file(self, path: str, content: str) -> str:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(content)
        return "written"

    def edit_file(self, path: str, old: str, new: str) -> str:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        count = text.count(old) if old else 0
        if count != 1:
            raise ValueError(f"expected the old text once in {path}, found it {count} times")
        return self.write_file(path, text.replace(old, new))

    def list_files(self, path: str = ".") -> str:
        if not os.path.isdir(path):
            raise OSError(f"no folder {path}")
        names: list[str] = []
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            names += [os.path.relpath(os.path.join(folder, n), path) for n in sorted(files)]
            if not folders and not files and folder != path:
                names.append(os.path.relpath(folder, path) + "/")
            if len(names) > LISTED:
                return "\n".join([*names[:LISTED], "[and more]"])
        return "\n".join(names) or "empty"

    def search(self, query: str, limit: int = 5) -> str:
        assert self._corpus is not None
        return str(self._corpus.search(query, limit))

    def fetch(self, name: str, offset: int = 0) -> str:
        assert self._corpus is not None
        return str(self._corpus.fetch(name, offset))

    def close(self) -> None:
        """Ends the interpreter."""
        if self._interpreter is not None:
            _kill(self._interpreter)
            for pipe in (self._interpreter.stdin, self._interpreter.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # code that it did not read any more
                    pipe.close()
            self._interpreter = None

    def _ends_of(self, file: Any) -> str:
        """The part of a file that can be shown: all of it, or the bytes at both ends."""
        limit = 4 * self._shown
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= 2 * limit:
            return str(file.read().decode("utf-8", "replace"))
        head = file.read(limit)
        file.seek(size - limit)
        middle = f"\n[... {size - 2 * limit} bytes left out ...]\n"
        return str((head + middle.encode() + file.read(limit)).decode("utf-8", "replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

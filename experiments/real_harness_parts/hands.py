"""Tool calls in the words of each harness: the same step is `bash` in pi and `Bash` in Claude Code.

Not here: what to do with them (`policies`). Invariant: a call names only tools that the harness
offers by default, with all arguments that it requires.
"""

from __future__ import annotations

import json
from typing import Protocol


class Hands(Protocol):
    """How one harness is told to act. Paths are relative to the workspace."""

    def read(self, path: str) -> str: ...

    def write(self, path: str, content: str) -> str: ...

    def shell(self, command: str) -> str: ...


class PiHands:
    """pi: read, write, bash; relative paths."""

    def __init__(self, workspace: str) -> None:
        del workspace  # pi stands in it

    def read(self, path: str) -> str:
        return tool_call("read", path=path)

    def write(self, path: str, content: str) -> str:
        return tool_call("write", path=path, content=content)

    def shell(self, command: str) -> str:
        return tool_call("bash", command=command)


class ClaudeHands:
    """Claude Code: Read, Write, Bash, Agent; absolute paths."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace

    def read(self, path: str) -> str:
        return tool_call("Read", file_path=f"{self._workspace}/{path}")

    def write(self, path: str, content: str) -> str:
        return tool_call("Write", file_path=f"{self._workspace}/{path}", content=content)

    def shell(self, command: str) -> str:
        return tool_call("Bash", command=command, description="Work on the files")

    def delegate(self, prompt: str) -> str:
        return tool_call(
            "Agent", description="Do the work", prompt=prompt, subagent_type="general-purpose"
        )


def tool_call(name: str, **arguments: str) -> str:
    """A call as the model writes it (Hermes style, as in Qwen3's chat template)."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

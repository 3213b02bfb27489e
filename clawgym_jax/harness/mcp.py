"""A task's MCP servers as a harness is told of them: paths filled in, names checked, files placed.

Adapters write what `place` returns into their program's own configuration; the program starts the
servers itself, inside the sandbox. Not here: the protocol, which is between program and server.
Invariant: nothing that is placed lies outside HOME, and no two servers overwrite each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import McpServer

_NAME = re.compile(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)*")
_MAX_NAME = 32  # with a tool's name behind it, it must fit the 64 characters that APIs allow
_PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Placed:
    """Servers ready to be written into a configuration."""

    servers: Mapping[str, McpServer]  # by name; their argv and env name paths inside the sandbox
    files: Mapping[str, bytes]  # path relative to HOME -> content

    def as_settings(self) -> dict[str, dict[str, Any]]:
        """name -> {"command", "args", "env"}: the form that most programs' settings share."""
        return {
            name: {"command": server.argv[0], "args": [*server.argv[1:]], "env": {**server.env}}
            for name, server in self.servers.items()
        }


def place(servers: Sequence[McpServer], workspace: str, home: str) -> Placed:
    """Fills {home} and {workspace} into argv and env; raises ConfigError for what cannot work."""
    placed: dict[str, McpServer] = {}
    files: dict[str, bytes] = {}
    for server in servers:
        _check(server, placed)
        for path, content in server.files.items():
            if files.setdefault(_inside(server, path), content) != content:
                raise ConfigError(
                    f"MCP servers: {server.name} brings another {path} than a server before it; "
                    "give each its own folder"
                )
        filled = [_fill(word, workspace, home) for word in server.argv]
        env = {name: _fill(value, workspace, home) for name, value in server.env.items()}
        placed[server.name] = McpServer(server.name, filled, env)
    return Placed(placed, files)


def corpus_server(name: str, folder: str) -> McpServer:
    """Search and fetch over a folder of texts; {home} and {workspace} in `folder` are replaced."""
    place_of = f".mcp_{name}"
    return McpServer(
        name=name,
        argv=("python3", "-I", "-S", f"{{home}}/{place_of}/corpus_server.py", folder),
        files={
            f"{place_of}/{program}": (_PROGRAMS / program).read_bytes()
            for program in ("corpus_server.py", "corpus.py")
        },
    )


def _fill(text: str, workspace: str, home: str) -> str:
    return text.replace("{home}", home).replace("{workspace}", workspace)


def _check(server: McpServer, others: Mapping[str, McpServer]) -> None:
    if not _NAME.fullmatch(server.name) or len(server.name) > _MAX_NAME:
        raise ConfigError(
            f"MCP server: expected a name of at most {_MAX_NAME} letters and digits with single "
            f'"_" between them (harnesses make tool names out of it), got {server.name!r}'
        )
    if server.name in others:
        raise ConfigError(f"MCP servers: two are called {server.name!r}; rename one")
    if not server.argv or not server.argv[0]:
        raise ConfigError(f"MCP server {server.name}: expected a command in argv, got none")


def _inside(server: McpServer, path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ConfigError(
            f"MCP server {server.name}: expected file paths relative to HOME, got {path!r}"
        )
    return str(pure)

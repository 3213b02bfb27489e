"""A minimal MCP client over a server's standard streams: initialize, tools/list, tools/call.

Lies beside agent.py in the sandbox; standard library only. Asks one thing at a time; what a server
asks of its client is refused politely. Invariant: a request returns, fails or times out, whatever
the server does. Source: the Model Context Protocol, transport "stdio".
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

VERSION = "2025-06-18"
MAX_PAGES = 100  # of tools/list


class McpError(Exception):
    """The server refused, died or did not answer in time."""


class Server:
    """One running server."""

    def __init__(self, argv: list[str], env: Mapping[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buffer = b""
        self._next_id = 0
        try:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise McpError(f"cannot start {argv[0]}: {error}") from error
        info = {"name": "agent_loop", "version": "1"}
        hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": info}
        try:
            self.request("initialize", hello)
            self._send({"method": "notifications/initialized"})
        except McpError:
            self.close()
            raise

    def tools(self) -> list[dict[str, Any]]:
        """All pages of the server's tools."""
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = self.request("tools/list", params)
            found += [tool for tool in _dicts(page.get("tools")) if tool.get("name")]
            if not page.get("nextCursor"):
                break
            params = {"cursor": page["nextCursor"]}
        return found

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool says, as text; errors of the tool are text too."""
        result = self.request("tools/call", {"name": name, "arguments": arguments})
        parts = [
            str(part.get("text"))
            if part.get("type") == "text"
            else f"[{part.get('type')} left out]"
            for part in _dicts(result.get("content"))
        ]
        if not parts and result.get("structuredContent") is not None:
            parts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
        text = "\n".join(parts)
        failed = result.get("isError") and not text.startswith("error")
        return f"error: {text}" if failed else text

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._next_id += 1
        self._send({"id": self._next_id, "method": method, "params": params})
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            message = self._receive(deadline_s, method)
            if "method" in message:
                self._decline(message)
            elif message.get("id") == self._next_id:
                result = message.get("result")
                if not isinstance(result, dict):
                    error = message.get("error")
                    told = error.get("message") if isinstance(error, dict) else message
                    raise McpError(f"{method}: {told}")
                return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what the server did not read any more
                    pipe.close()

    def _decline(self, message: dict[str, Any]) -> None:
        """Answers what the server asks: a ping, or something that this client cannot do."""
        if "id" not in message:
            return
        if message["method"] == "ping":
            self._send({"id": message["id"], "result": {}})
        else:
            error = {"code": -32601, "message": "this client has no such method"}
            self._send({"id": message["id"], "error": error})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:
            if "method" in message:  # an answer to it may find it gone: reading will say so
                raise McpError(f"{message['method']}: the server has ended") from error

    def _receive(self, deadline_s: float, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                try:
                    message = json.loads(line)
                except ValueError:
                    continue  # servers print things that are no messages
                if isinstance(message, dict):
                    return message
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise McpError(f"{what}: no answer within {self._timeout_s:g} s")
            piece = os.read(pipe, 65536)
            if not piece:
                raise McpError(f"{what}: the server has ended")
            self._buffer += piece


def _dicts(value: object) -> list[dict[str, Any]]:
    """The objects of what should be a list of objects."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

"""An MCP server over a folder of texts, with the tools `search` and `fetch`.

    python3 -I -S corpus_server.py FOLDER     JSON-RPC 2.0 over standard streams, one message a line

Standard library only; corpus.py lies beside it. It offers tools and nothing else. It ends when
its input ends. Invariant: every request gets exactly one answer, a notification none.
Source: the Model Context Protocol, transport "stdio".
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from corpus import Corpus  # type: ignore[import-not-found]  # noqa: E402

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # newest first
PARSE_ERROR, INVALID_REQUEST, NO_METHOD, BAD_PARAMS = -32700, -32600, -32601, -32602


def schema(required: str, **properties: tuple[str, str]) -> dict[str, Any]:
    described = {
        name: {"type": kind, "description": description}
        for name, (kind, description) in properties.items()
    }
    return {"type": "object", "properties": described, "required": [required]}


TOOLS = [
    {
        "name": "search",
        "description": "Search the documents; returns the best passages and where they are.",
        "inputSchema": schema(
            "query", query=("string", "Words to look for"), limit=("integer", "How many, default 5")
        ),
    },
    {
        "name": "fetch",
        "description": "Read a document, a page at a time.",
        "inputSchema": schema(
            "name",
            name=("string", "The document, as search names it"),
            offset=("integer", "Where to begin, in characters; default 0"),
        ),
    },
]


class Fault(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def call_tool(corpus: Corpus, name: object, arguments: dict[str, Any]) -> str:
    number = {"search": ("limit", 5), "fetch": ("offset", 0)}.get(str(name))
    if number is None:
        raise Fault(BAD_PARAMS, f"expected one of the tools search and fetch, got {name!r}")
    key, default = number
    text = arguments.get("query" if name == "search" else "name")
    value = arguments.get(key, default)
    if not isinstance(text, str) or not isinstance(value, int | float):
        raise ValueError(f"expected a text and a number {key}, got {json.dumps(arguments)}")
    found = corpus.search if name == "search" else corpus.fetch
    return str(found(text, int(value)))


def answer(corpus: Corpus, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request."""
    if method == "initialize":
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "corpus", "version": "1"},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        arguments = params.get("arguments") or {}
        try:
            text, failed = call_tool(corpus, params.get("name"), arguments), False
        except (OSError, ValueError, AttributeError) as error:
            text, failed = f"error: {error}", True
        return {"content": [{"type": "text", "text": text}], "isError": failed}
    raise Fault(NO_METHOD, f"no method {method}")


def respond(corpus: Corpus, line: str) -> dict[str, Any] | None:
    """The answer to one line of input; None for notifications and answers."""
    request_id = None
    try:
        try:
            message = json.loads(line)
        except ValueError as error:
            raise Fault(PARSE_ERROR, f"not JSON: {error}") from error
        if not isinstance(message, dict) or not ("method" in message or "id" in message):
            raise Fault(INVALID_REQUEST, "expected one request as an object")
        if "id" not in message or "method" not in message:
            return None
        request_id = message["id"]
        params = message.get("params") or {}
        if not isinstance(params, dict):
            raise Fault(BAD_PARAMS, "expected params as an object")
        result = answer(corpus, str(message["method"]), params)
    except Fault as fault:
        refusal = {"code": fault.code, "message": str(fault)}
        return {"jsonrpc": "2.0", "id": request_id, "error": refusal}
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def main() -> int:
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.stderr.write(f"expected one folder as argument, got {sys.argv[1:]}\n")
        return 2
    corpus = Corpus(sys.argv[1])
    for line in sys.stdin:
        reply = respond(corpus, line) if line.strip() else None
        if reply is not None:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

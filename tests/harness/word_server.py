"""The smallest MCP server that shows that a harness calls it: one tool, which reverses a word."""

from __future__ import annotations

from clawgym_jax.core.interfaces import McpServer

PROGRAM = """
import json
import sys

TOOL = {
    "name": "reverse",
    "description": "Reverse a word",
    "inputSchema": {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    },
}


def answer(method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "words", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": params["arguments"]["word"][::-1]}]}
    return None


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    result = answer(message["method"], message.get("params", {}))
    if result is None:
        reply["error"] = {"code": -32601, "message": "no such method"}
    else:
        reply["result"] = result
    print(json.dumps(reply), flush=True)
"""
PLACE = ".mcp_words/server.py"
WORDS = McpServer("words", ("python3", "-I", f"{{home}}/{PLACE}"), files={PLACE: PROGRAM.encode()})

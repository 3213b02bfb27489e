"""tiny_chat: a small agent program that speaks Chat Completions. Runs as `python3 -I -S agent.py`.

    agent.py PROMPT     in the workspace; $HOME/.tiny_chat/config.json and $TINY_CHAT_KEY set it up

It is a real harness to everything else: it keeps its own history, re-serialises arguments and
sends a failed request again. It imports nothing of the package that launches it. Exit status: 0
the model ended its turn, 1 the API failed, 2 too many turns.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

HOME = os.environ["HOME"] + "/.tiny_chat"
sys.path.insert(0, HOME)

import tiny_http  # type: ignore[import-not-found]  # noqa: E402

SYSTEM = "You work on files. Use the tools to do the task, then reply done."
SHOWN = 8000  # characters of a file that the model sees


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("list_files", "List a folder", "path"),
    tool("read_file", "Read a file", "path"),
    tool("write_file", "Write a file", "path", "content"),
]


def inside(path: str) -> str:
    """A path of the workspace, or an error."""
    root = os.path.realpath(".")
    full = os.path.realpath(path)
    if full != root and not full.startswith(root + "/"):
        raise OSError(f"outside the workspace: {path}")
    return full


def list_files(path: str) -> str:
    folder = inside(path)
    names = [n + "/" * os.path.isdir(folder + "/" + n) for n in sorted(os.listdir(folder))]
    return "\n".join(names) or "empty"


def read_file(path: str) -> str:
    with open(inside(path), encoding="utf-8", errors="replace") as file:
        text = file.read(SHOWN + 1)
    return text.rstrip("\n") if len(text) <= SHOWN else text[:SHOWN] + "..."


def write_file(path: str, content: str) -> str:
    with open(inside(path), "w", encoding="utf-8", errors="replace") as file:
        file.write(content)
    return "ok"


def run_tool(name: str, text: str) -> str:
    """Result of a call as text; errors are results too."""
    functions: dict[str, Any] = {
        "list_files": list_files,
        "read_file": read_file,
        "write_file": write_file,
    }
    try:
        arguments = json.loads(text)
    except ValueError:
        return "error: arguments are not JSON"
    if name not in functions:
        return f"error: no tool {name}"
    wanted = functions[name].__code__.co_varnames[: functions[name].__code__.co_argcount]
    if not isinstance(arguments, dict) or set(arguments) != set(wanted):
        return "error: expected " + ", ".join(wanted)
    if not all(isinstance(value, str) for value in arguments.values()):
        return "error: arguments must be text"
    try:
        return str(functions[name](**arguments))
    except (OSError, ValueError) as error:
        return f"error: {getattr(error, 'strerror', None) or error}"


def compact(text: str) -> str:
    """Arguments as most harnesses send them back: parsed and written again."""
    try:
        return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return text


def ask(config: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One model call; returns the assistant message."""
    body = {
        "model": config["model"],
        "messages": messages,
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": config["max_tokens"],
    }

    def send(attempt: int) -> dict[str, Any]:
        headers = {
            "Authorization": "Bearer " + os.environ["TINY_CHAT_KEY"],
            "x-stainless-retry-count": attempt,
        }
        url = config["base_url"] + "/chat/completions"
        return gather(tiny_http.post_events(url, headers, body, config["timeout_s"]))

    message: dict[str, Any] = tiny_http.with_retries(config["attempts"], send)
    return message


def gather(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An assistant message from the chunks of a stream."""
    content, finish = "", None
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        if "error" in chunk:
            raise tiny_http.ApiError(500, chunk["error"]["message"])
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part["index"] == len(calls):
                    function = {"name": part["function"]["name"], "arguments": ""}
                    calls.append({"id": part["id"], "type": "function", "function": function})
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if finish is None:
        raise tiny_http.ApiError(0, "the stream ended without a finish reason")
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = calls
    return message


def main() -> int:
    with open(HOME + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": sys.argv[1]},
    ]
    for _ in range(config["max_turns"]):
        try:
            message = ask(config, messages)
        except tiny_http.ApiError as error:
            sys.stderr.write(f"api error {error}\n")
            return 1
        messages.append(message)
        if "tool_calls" not in message:
            sys.stdout.write((message["content"] or "") + "\n")
            return 0
        for call in message["tool_calls"]:
            function = call["function"]
            result = run_tool(function["name"], function["arguments"])
            function["arguments"] = compact(function["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    sys.stderr.write("too many turns\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""tiny_shell: a small agent program that speaks Anthropic Messages.

    python3 -I -S agent.py PROMPT     in the workspace

$HOME/.tiny_shell/config.json and $TINY_SHELL_KEY set it up.

It behaves like the large ones where that matters to a recorder: a moving cache mark that turns
string contents into lists and back, kept thinking blocks, retries without a retry header; and, if
configured, a compacted context and a sub-agent. It imports nothing of the package that launches
it. Exit status: 0 the model ended its turn, 1 the API failed, 2 too many turns.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

HOME = os.environ["HOME"] + "/.tiny_shell"
sys.path.insert(0, HOME)

import tiny_http  # type: ignore[import-not-found]  # noqa: E402

SYSTEM = "You are an agent with a shell. Do the task with bash and answer done."
AGENT_SYSTEM = "You answer a question about files. Use bash, then give the answer."
SUMMARY_ORDER = "Summarise this conversation so that the work can go on. Use no tools."
CONTINUED = "This session is being continued. Done so far:\n{summary}\n\nThe task:\n{task}"
SHOWN = 8000  # characters of an output that the model sees


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    return {"name": name, "description": description, "input_schema": schema}


BASH = tool("bash", "Run a command", "command")
ASK_AGENT = tool("ask_agent", "Ask another agent", "prompt")


class TooManyTurns(Exception):
    pass


def run_command(command: str, timeout_s: float) -> str:
    """Output of a shell command; nothing that it started is left."""
    reader, writer = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, writer, 1),
        (os.POSIX_SPAWN_DUP2, writer, 2),
        (os.POSIX_SPAWN_CLOSE, reader),
        (os.POSIX_SPAWN_CLOSE, writer),
    ]
    env = {name: value for name, value in os.environ.items() if name != "TINY_SHELL_KEY"}
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], env, file_actions=actions, setpgroup=0)
    os.close(writer)
    output, status = collect(pid, reader, time.monotonic() + timeout_s)
    os.close(reader)
    text = output.decode("utf-8", "replace").rstrip("\n")
    if len(text) > SHOWN:
        text = text[:SHOWN] + "..."
    if status is None:
        text += f"\ntimed out after {timeout_s:g} s"
    elif status:
        text += f"\nexit status {status}"
    return text.strip("\n") or "ok"


def collect(pid: int, reader: int, deadline_s: float) -> tuple[bytes, int | None]:
    """(output, exit status or None where it was killed) of a process group's leader."""
    output, status, closed = b"", None, False
    while status is None and time.monotonic() < deadline_s:
        if closed:
            time.sleep(0.005)
        elif select.select([reader], [], [], 0.05)[0]:
            piece = os.read(reader, 65536)
            output = (output + piece)[: 4 * SHOWN]
            closed = not piece
            if piece:
                continue
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
    try:  # noqa: SIM105 (contextlib is slow to import)
        os.killpg(pid, 9)
    except OSError:
        pass  # nothing was left
    if status is None:
        os.waitpid(pid, 0)
    while len(output) < 4 * SHOWN and select.select([reader], [], [], 0)[0]:
        piece = os.read(reader, 65536)
        if not piece:
            break
        output += piece
    return output, status


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as sent: the newest content carries the cache mark, so it is a list of blocks."""
    newest = dict(messages[-1])
    if isinstance(newest["content"], str):
        newest["content"] = [{"type": "text", "text": newest["content"]}]
    *others, last = newest["content"]
    newest["content"] = [*others, {**last, "cache_control": {"type": "ephemeral"}}]
    return [*messages[:-1], newest]


def gather(events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """(content blocks, tokens used) from the events of a stream."""
    blocks: list[dict[str, Any]] = []
    parts: dict[int, str] = {}
    used, ended = 0, False
    for event in events:
        kind = event["type"]
        if kind == "error":
            raise tiny_http.ApiError(500, event["error"]["message"])
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                parts[event["index"]] = parts.get(event["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif kind == "content_block_stop" and event["index"] in parts:
            blocks[event["index"]]["input"] = json.loads(parts[event["index"]])
        elif kind == "message_delta":
            used = event["usage"]["input_tokens"] + event["usage"]["output_tokens"]
        ended = ended or kind == "message_stop"
    if not ended:
        raise tiny_http.ApiError(0, "the stream ended without message_stop")
    return blocks, used


class Agent:
    """One conversation: the main one, or a sub-agent's."""

    def __init__(
        self,
        config: dict[str, Any],
        system: str,
        tools: list[dict[str, Any]],
        agent_id: str = "",
    ) -> None:
        self.config = config
        self.system = system
        self.tools = tools
        self.agent_id = agent_id
        self.messages: list[dict[str, Any]] = []
        self.turns = 0

    def ask(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
        """One model call."""
        config = self.config
        body = {
            "model": config["model"],
            "max_tokens": config["max_tokens"],
            "system": [{"type": "text", "text": self.system}],
            "messages": marked(messages),
            "tools": self.tools,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        }
        headers = {"x-api-key": os.environ["TINY_SHELL_KEY"], "anthropic-version": "2023-06-01"}
        if self.agent_id:
            headers["x-tiny-shell-agent-id"] = self.agent_id

        def send(_: int) -> tuple[list[dict[str, Any]], int]:
            url = config["base_url"] + "/v1/messages"
            return gather(tiny_http.post_events(url, headers, body, config["timeout_s"]))

        blocks, used = tiny_http.with_retries(config["attempts"], send)
        return blocks, used

    def work(self, task: str) -> str:
        """Calls the model until it ends its turn; returns what it said last."""
        self.messages = [{"role": "user", "content": task}]
        while self.turns < self.config["max_turns"]:
            self.turns += 1
            blocks, used = self.ask(self.messages)
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if not calls:
                return "".join(b["text"] for b in blocks if b["type"] == "text")
            results = [self.result(call) for call in calls]
            self.messages.append({"role": "assistant", "content": blocks})
            self.messages.append({"role": "user", "content": results})
            if 0 < self.config["compact_at_tok"] <= used:
                self.compact(task)
        raise TooManyTurns

    def result(self, call: dict[str, Any]) -> dict[str, Any]:
        text = self.run(call["name"], call["input"])
        return {"type": "tool_result", "tool_use_id": call["id"], "content": text}

    def run(self, name: str, given: dict[str, Any]) -> str:
        schema = next((t["input_schema"] for t in self.tools if t["name"] == name), None)
        if schema is None:
            return f"error: no tool {name}"
        (wanted,) = schema["properties"]
        if set(given) != {wanted} or not isinstance(given[wanted], str):
            return f"error: expected {wanted} as text"
        if name == "bash":
            try:
                return run_command(given[wanted], self.config["command_timeout_s"])
            except ValueError as error:  # a null byte
                return f"error: {error}"
        agent_id = f"agent{self.turns}"
        return Agent(self.config, AGENT_SYSTEM, [BASH], agent_id).work(given[wanted])

    def compact(self, task: str) -> None:
        """Replaces the history by a summary that the model writes."""
        *before, newest = self.messages
        order = {"type": "text", "text": SUMMARY_ORDER}
        blocks, _ = self.ask([*before, {**newest, "content": [*newest["content"], order]}])
        summary = "".join(block["text"] for block in blocks if block["type"] == "text")
        text = CONTINUED.format(summary=summary, task=task)
        self.messages = [{"role": "user", "content": text}]


def main() -> int:
    with open(HOME + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    tools = [BASH, ASK_AGENT] if config["agents"] else [BASH]
    try:
        said = Agent(config, SYSTEM, tools).work(sys.argv[1])
    except tiny_http.ApiError as error:
        sys.stderr.write(f"api error {error}\n")
        return 1
    except TooManyTurns:
        sys.stderr.write("too many turns\n")
        return 2
    sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

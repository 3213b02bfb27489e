"""agent_loop: a transparent loop of reasoning and tool calls over Chat Completions.

    python3 -I -S agent.py PROMPT     in the workspace

$HOME/.agent_loop/config.json and $AGENT_LOOP_KEY set it up. It asks the model, runs the calls of
its answer one after another, appends their results, and asks again until an answer calls nothing.
MCP servers of the configuration are started, and their tools offered as SERVER__TOOL.
Not here: the tools themselves (`agent_tools`, `mcp_client`); streaming.
Invariant: a request's messages begin with all of the request before, as the model gave them.
Exit status: 0 the model ended its turn, 1 the API or a server failed, 2 too many turns.
"""

from __future__ import annotations

import http.client
import json
import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

HOME = os.environ["HOME"] + "/.agent_loop"
sys.path.insert(0, HOME)

import agent_tools  # type: ignore[import-not-found]  # noqa: E402
import mcp_client  # type: ignore[import-not-found]  # noqa: E402
import tiny_http  # type: ignore[import-not-found]  # noqa: E402

CUT = "Your answer was cut off at the limit of its length. Go on, more briefly."
SUMMARY_ORDER = "Summarise this conversation so that the work can go on. Use no tools."
CONTINUED = "{task}\n\nThis was begun before. Done so far:\n{summary}"


class Model:
    """The endpoint."""

    def __init__(self, config: dict[str, Any], key: str) -> None:
        self._config = config
        self._key = key
        self.used_tok = 0  # prompt and answer of the last call

    def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """One call; returns the choice."""
        body: dict[str, Any] = {
            "model": self._config["model"],
            "messages": messages,
            "max_completion_tokens": self._config["max_tokens"],
        }
        if tools:
            body["tools"] = tools
        payload = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")

        def send(attempt: int) -> dict[str, Any]:
            return self._post(payload, attempt)

        answer = tiny_http.with_retries(self._config["attempts"], send)
        self.used_tok = answer["usage"]["total_tokens"]
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def _post(self, payload: bytes, attempt: int) -> dict[str, Any]:
        place, _, path = self._config["base_url"].removeprefix("http://").partition("/")
        headers = {
            "Authorization": "Bearer " + self._key,
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(attempt),
        }
        connection = http.client.HTTPConnection(place, timeout=self._config["timeout_s"])
        try:
            connection.request("POST", f"/{path}/chat/completions", payload, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise tiny_http.ApiError(response.status, text.decode("utf-8", "replace"))
            answer: dict[str, Any] = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise tiny_http.ApiError(0, error) from error
        finally:
            connection.close()
        return answer


class Toolbox:
    """Own tools and those of MCP servers, under the names that the model knows."""

    def __init__(self, config: dict[str, Any]) -> None:
        timeout_s, shown = config["tool_timeout_s"], config["output_chars"]
        self._own = agent_tools.Tools(timeout_s, shown, config["corpus"])
        self._tools = {
            tool.name: tool
            for tool in self._own.offered()
            if not config["tools"] or tool.name in config["tools"]
        }
        self._servers: list[Any] = []
        self._theirs: dict[str, tuple[Any, str]] = {}
        self.described = [
            _described(tool.name, tool.description, tool.parameters)
            for tool in self._tools.values()
        ]
        try:
            for name, told in config["servers"].items():
                self._start(name, told, timeout_s)
        except mcp_client.McpError:
            self.close()
            raise

    def run(self, name: str, text: str) -> str:
        """The result of a call as text; errors are results too."""
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        try:
            if name in self._theirs:
                server, remote = self._theirs[name]
                return str(self._own.cut(server.call(remote, arguments)))
            if name not in self._tools:
                known = ", ".join([*self._tools, *self._theirs])
                return f"error: no tool {name}, expected one of {known}"
            fault = self._tools[name].fault(arguments)
            return f"error: {fault}" if fault else self._own.cut(self._tools[name].run(**arguments))
        except (OSError, ValueError, mcp_client.McpError) as error:
            return f"error: {error}"

    def close(self) -> None:
        self._own.close()
        for server in self._servers:
            server.close()

    def _start(self, name: str, told: dict[str, Any], timeout_s: float) -> None:
        server = mcp_client.Server([told["command"], *told["args"]], told["env"], timeout_s)
        self._servers.append(server)
        for tool in server.tools():
            offered = f"{name}__{tool['name']}"
            self._theirs[offered] = (server, tool["name"])
            schema = tool.get("inputSchema") or {"type": "object", "properties": {}}
            self.described.append(_described(offered, tool.get("description") or "", schema))


def _described(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class Loop:
    """The conversation."""

    def __init__(self, config: dict[str, Any], model: Model, toolbox: Toolbox, task: str) -> None:
        self._config, self._model, self._toolbox, self._task = config, model, toolbox, task
        self._messages = self._opening(task)

    def work(self) -> str | None:
        """What the model said last, or None where it went on for too long."""
        for _ in range(self._config["max_turns"]):
            choice = self._model.ask(self._messages, self._toolbox.described)
            message = choice["message"]
            self._messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls and choice["finish_reason"] != "length":
                return message["content"] or ""
            if not calls:
                self._messages.append({"role": "user", "content": CUT})
            for call in calls:
                function = call["function"]
                result = self._toolbox.run(function["name"], function["arguments"])
                answer = {"role": "tool", "tool_call_id": call["id"], "content": result}
                self._messages.append(answer)
            if 0 < self._config["compact_at_tok"] <= self._model.used_tok:
                self._compact()
        return None

    def _opening(self, text: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": self._config["system"]},
            {"role": "user", "content": text},
        ]

    def _compact(self) -> None:
        """Goes on from a summary. The call for it extends the history, like any other."""
        order = {"role": "user", "content": SUMMARY_ORDER}
        choice = self._model.ask([*self._messages, order], self._toolbox.described)
        summary = choice["message"]["content"] or ""
        self._messages = self._opening(CONTINUED.format(task=self._task, summary=summary))


def main() -> int:
    key = os.environ.pop("AGENT_LOOP_KEY")  # not for the tools
    with open(HOME + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    toolbox = None
    try:
        toolbox = Toolbox(config)
        said = Loop(config, Model(config, key), toolbox, sys.argv[1]).work()
    except (tiny_http.ApiError, mcp_client.McpError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        if toolbox is not None:
            toolbox.close()
    if said is None:
        sys.stderr.write("too many turns\n")
        return 2
    sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

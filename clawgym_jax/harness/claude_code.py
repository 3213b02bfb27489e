"""Claude Code 2.1.332 (npm @anthropic-ai/claude-code): Anthropic Messages, always streaming.

A native binary, told everything by its environment. Sub-agents share the session and name
themselves in a header. The model's name decides the shape of its prompt, so a name that it knows
is used whatever the endpoint calls its model.
Invariant: nothing leaves the sandbox but requests to the endpoint (no telemetry, no updates).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import place
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

VERSION = "2.1.332"
AGENT_HEADER = "x-claude-code-agent-id"
OWN_LEAST_WINDOW_TOK = 100_000  # a smaller window counts as this one when it plans a compaction
COMPACT_ROOM = 0.1  # of a smaller window, left free besides the summary's own tokens
CALL_MS = 7_200_000  # for one answer; the proxy ends a call that takes too long
MCP_FILE = ".claude/servers.json"
OFF = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
)


@dataclass(frozen=True)
class ClaudeCode:
    """Adapter of the `claude` program in the image claude-code."""

    name: str = "claude_code"
    protocol: str = "anthropic"
    image: str = "claude-code"
    model: str = "claude-sonnet-4-5"  # what it believes to talk to
    parallel_agents: bool = True  # False: a sub-agent runs while its caller waits
    max_retries: int = 10
    tools: tuple[str, ...] = ()  # the built-in tools it may use (--tools); () = all of them
    system_prompt: str = ""  # in place of its own (--system-prompt); "" = its own
    mcp: bool = True

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        env = {
            "PATH": "/opt/harness/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "LANG": "C.UTF-8",
            "CLAUDE_CONFIG_DIR": f"{home}/.claude",
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.model,
            "ANTHROPIC_SMALL_FAST_MODEL": self.model,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a nonce in the system prompt
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.window_tok),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tok),
            "CLAUDE_CODE_MAX_RETRIES": str(self.max_retries),
            "API_TIMEOUT_MS": str(CALL_MS),
            **dict.fromkeys(OFF, "1"),
        }
        if endpoint.window_tok < OWN_LEAST_WINDOW_TOK:
            env["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(_compact_at_percent(endpoint))
        if not self.parallel_agents:
            env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] = "1"
        flags = ["--dangerously-skip-permissions", "--output-format", "json"]
        if self.tools:
            flags += ["--tools", ",".join(self.tools)]
        if self.system_prompt:
            flags += ["--system-prompt", self.system_prompt]
        files: dict[str, bytes] = {}
        if servers:
            placed = place(servers, workspace, home)
            # alwaysLoad: connected before the first call, and not hidden behind ToolSearch.
            told = {name: {**s, "alwaysLoad": True} for name, s in placed.as_settings().items()}
            files = {MCP_FILE: json.dumps({"mcpServers": told}).encode(), **placed.files}
            flags += ["--mcp-config", f"{home}/{MCP_FILE}", "--strict-mcp-config"]
        return LaunchPlan(argv=["claude", "-p", *flags, "--", instruction], env=env, files=files)

    def chain(self, view: RequestView) -> str:
        return view.headers.get(AGENT_HEADER, MAIN_CHAIN)

    def role(self, view: RequestView) -> Role:
        role = role_of(view)
        return Role.SUBAGENT if role is Role.MAIN and AGENT_HEADER in view.headers else role


def _compact_at_percent(endpoint: Endpoint) -> int:
    """When to compact in a window that is too small for it, as a share of the least one it knows.

    Without this it goes on until the endpoint refuses a prompt for its length, and compacts then.
    """
    answer_tok = min(endpoint.max_tok, endpoint.window_tok // 4)
    limit_tok = endpoint.window_tok * (1 - COMPACT_ROOM) - answer_tok
    return max(1, int(100 * limit_tok / OWN_LEAST_WINDOW_TOK))

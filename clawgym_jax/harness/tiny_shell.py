"""tiny_shell: one shell tool over Anthropic Messages, with compaction and a sub-agent on request.

Its program (programs/tiny_shell.py) needs nothing but python3 and /bin/sh in the sandbox.
Invariant: the launch plan depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of
from clawgym_jax.harness.tiny_plan import Settings, tiny_plan

_AGENT_HEADER = "x-tiny-shell-agent-id"


@dataclass(frozen=True)
class TinyShell:
    """Adapter of programs/tiny_shell.py."""

    name: str = "tiny_shell"
    protocol: str = "anthropic"
    image: str = ""
    max_turns: int = 12
    attempts: int = 5  # requests sent for one call before giving up
    timeout_s: float = 600.0  # without a byte from the model
    command_timeout_s: float = 10.0
    compact_at_tok: int = 0  # context use that makes it summarise; 0: never
    agents: bool = False  # offers the tool that asks a sub-agent
    mcp: bool = False

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        settings: Settings = {
            "base_url": endpoint.base_url,
            "max_turns": self.max_turns,
            "attempts": self.attempts,
            "timeout_s": self.timeout_s,
            "command_timeout_s": self.command_timeout_s,
            "compact_at_tok": self.compact_at_tok,
            "agents": self.agents,
        }
        return tiny_plan("tiny_shell", endpoint, instruction, home, settings)

    def chain(self, view: RequestView) -> str:
        return view.headers.get(_AGENT_HEADER, MAIN_CHAIN)

    def role(self, view: RequestView) -> Role:
        return role_of(view)

"""tiny_chat: three file tools over Chat Completions; the smallest complete harness.

Its program (programs/tiny_chat.py) needs nothing but python3 in the sandbox. Not a toy for the
proxy: it is started, fed and stopped like any other harness.
Invariant: the launch plan depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import role_of
from clawgym_jax.harness.tiny_plan import Settings, tiny_plan


@dataclass(frozen=True)
class TinyChat:
    """Adapter of programs/tiny_chat.py."""

    name: str = "tiny_chat"
    protocol: str = "openai-chat"
    image: str = ""
    max_turns: int = 12
    attempts: int = 5  # requests sent for one call before giving up
    timeout_s: float = 600.0  # without a byte from the model
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
            "base_url": endpoint.base_url + "/v1",
            "max_turns": self.max_turns,
            "attempts": self.attempts,
            "timeout_s": self.timeout_s,
        }
        return tiny_plan("tiny_chat", endpoint, instruction, home, settings)

    def chain(self, view: RequestView) -> str:
        return "main"

    def role(self, view: RequestView) -> Role:
        return role_of(view)

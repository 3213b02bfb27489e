"""tiny_shell: one shell tool over Anthropic Messages, with compaction and a sub-agent on request.

Its program (programs/tiny_shell.py) needs nothing but python3 and /bin/sh in the sandbox.
Invariant: the launch plan depends only on its arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

_PROGRAMS = Path(__file__).parent / "programs"
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

    def launch(self, endpoint: Endpoint, instruction: str, workspace: str, home: str) -> LaunchPlan:
        config = {
            "base_url": endpoint.base_url,
            "model": endpoint.model,
            "max_tokens": endpoint.max_tok,
            "max_turns": self.max_turns,
            "attempts": self.attempts,
            "timeout_s": self.timeout_s,
            "command_timeout_s": self.command_timeout_s,
            "compact_at_tok": self.compact_at_tok,
            "agents": self.agents,
        }
        return LaunchPlan(
            argv=["python3", "-I", "-S", f"{home}/.tiny_shell/agent.py", instruction],
            env={"HOME": home, "TINY_SHELL_KEY": endpoint.key},
            files={
                ".tiny_shell/agent.py": (_PROGRAMS / "tiny_shell.py").read_bytes(),
                ".tiny_shell/tiny_http.py": (_PROGRAMS / "tiny_http.py").read_bytes(),
                ".tiny_shell/config.json": json.dumps(config).encode(),
            },
        )

    def chain(self, view: RequestView) -> str:
        return view.headers.get(_AGENT_HEADER, MAIN_CHAIN)

    def role(self, view: RequestView) -> Role:
        return role_of(view)

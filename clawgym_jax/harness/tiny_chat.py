"""tiny_chat: three file tools over Chat Completions; the smallest complete harness.

Its program (programs/tiny_chat.py) needs nothing but python3 in the sandbox. Not a toy for the
proxy: it is started, fed and stopped like any other harness.
Invariant: the launch plan depends only on its arguments.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import role_of

_PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class TinyChat:
    """Adapter of programs/tiny_chat.py."""

    name: str = "tiny_chat"
    protocol: str = "openai-chat"
    image: str = ""
    max_turns: int = 12
    attempts: int = 5  # requests sent for one call before giving up
    timeout_s: float = 600.0  # without a byte from the model

    def launch(self, endpoint: Endpoint, instruction: str, workspace: str, home: str) -> LaunchPlan:
        config = {
            "base_url": endpoint.base_url + "/v1",
            "model": endpoint.model,
            "max_tokens": endpoint.max_tok,
            "max_turns": self.max_turns,
            "attempts": self.attempts,
            "timeout_s": self.timeout_s,
        }
        return LaunchPlan(
            argv=["python3", "-I", "-S", f"{home}/.tiny_chat/agent.py", instruction],
            env={"HOME": home, "TINY_CHAT_KEY": endpoint.key},
            files={
                ".tiny_chat/agent.py": (_PROGRAMS / "tiny_chat.py").read_bytes(),
                ".tiny_chat/tiny_http.py": (_PROGRAMS / "tiny_http.py").read_bytes(),
                ".tiny_chat/config.json": json.dumps(config).encode(),
            },
        )

    def chain(self, view: RequestView) -> str:
        return "main"

    def role(self, view: RequestView) -> Role:
        return role_of(view)

"""agent_loop: our white-box agent, a plain loop over Chat Completions with the usual tools.

Its program (programs/agent_loop.py and what lies beside it) needs nothing but python3 in the
sandbox: bash, a Python session, files, search and fetch over a folder of texts, and the tools of
MCP servers. It is the baseline to which opaque harnesses are compared: nothing is rewritten, so
every call extends the call before.
Invariant: the launch plan depends only on its arguments.
Source: ClawGym II, its white-box agent loop; ReAct (Yao et al., 2023) for the loop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import place
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

FOLDER = ".agent_loop"
_PROGRAMS = Path(__file__).parent / "programs"
_BESIDE = ("agent_tools.py", "corpus.py", "interpreter.py", "mcp_client.py", "tiny_http.py")
SYSTEM = (
    "You are an agent that solves a task in a working folder with tools. Think about what to do, "
    "call tools, look at their results, and go on until the task is solved and checked. Then "
    "answer without calling a tool."
)


@dataclass(frozen=True)
class AgentLoop:
    """Adapter of programs/agent_loop.py."""

    name: str = "agent_loop"
    protocol: str = "openai-chat"
    image: str = ""
    system: str = SYSTEM
    tools: tuple[str, ...] = ()  # which of its own tools it offers; () = all
    corpus: str = ""  # folder of texts for search and fetch, may name {workspace} or {home}
    max_turns: int = 50
    tool_timeout_s: float = 60.0
    output_chars: int = 8000  # of a tool's result that the model sees
    compact_at_tok: int = 0  # context use that makes it go on from a summary; 0: never
    attempts: int = 5  # requests sent for one call before giving up
    timeout_s: float = 3600.0  # for one answer
    mcp: bool = True

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        placed = place(servers, workspace, home)
        config: dict[str, Any] = {
            "base_url": f"{endpoint.base_url}/v1",
            "model": endpoint.model,
            "max_tokens": endpoint.max_tok,
            "system": self.system,
            "tools": self.tools,
            "corpus": self.corpus.replace("{workspace}", workspace).replace("{home}", home),
            "max_turns": self.max_turns,
            "tool_timeout_s": self.tool_timeout_s,
            "output_chars": self.output_chars,
            "compact_at_tok": self.compact_at_tok,
            "attempts": self.attempts,
            "timeout_s": self.timeout_s,
            "servers": placed.as_settings(),
        }
        return LaunchPlan(
            argv=["python3", "-I", "-S", f"{home}/{FOLDER}/agent.py", instruction],
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin:/opt/python/bin",  # the last: bubblewrap
                "HOME": home,
                "LANG": "C.UTF-8",
                "AGENT_LOOP_KEY": endpoint.key,
            },
            files={
                f"{FOLDER}/agent.py": (_PROGRAMS / "agent_loop.py").read_bytes(),
                **{f"{FOLDER}/{name}": (_PROGRAMS / name).read_bytes() for name in _BESIDE},
                f"{FOLDER}/config.json": json.dumps(config).encode(),
                **placed.files,
            },
        )

    def chain(self, view: RequestView) -> str:
        return MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        return role_of(view)

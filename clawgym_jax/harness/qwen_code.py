"""Qwen Code 0.24.4 (npm @qwen-code/qwen-code): Chat Completions, always streaming.

Told by a settings file below HOME and by flags. It sends no session id; sub-agents and compaction
are told apart by their system prompts. With the most tokens of an answer set by us, it does not
throw a cut answer away to ask again for a longer one.
Invariant: nothing leaves the sandbox but requests to the endpoint (no telemetry, no updates).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import place
from clawgym_jax.harness.roles import role_of

VERSION = "0.24.4"
DAY_MS = 86_400_000
MEMORY = ("enableManagedAutoMemory", "enableManagedAutoDream")
OFF = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "tools": {"useRipgrep": False},  # the one it brings cannot be executed
}


@dataclass(frozen=True)
class QwenCode:
    """Adapter of the `qwen` program in the image qwen-code."""

    name: str = "qwen_code"
    protocol: str = "openai-chat"
    image: str = "qwen-code"
    max_retries: int = 10
    memory: bool = False  # True: an agent of its own notes what to remember after each session
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
        shown = {"trust": True, "alwaysLoadTools": True}  # its tools, not names to search for
        trusted = {name: {**told, **shown} for name, told in placed.as_settings().items()}
        generation = {
            "contextWindowSize": endpoint.window_tok,
            "maxRetries": self.max_retries,
            "timeout": DAY_MS,
        }
        settings = {
            **OFF,
            "memory": dict.fromkeys(MEMORY, self.memory),
            "model": {"generationConfig": generation},
            "mcpServers": trusted,
        }
        flags = ["--auth-type", "openai", "--openai-base-url", f"{endpoint.base_url}/v1"]
        flags += ["-m", endpoint.model, "-y", "--output-format", "json"]
        return LaunchPlan(
            argv=["qwen", *flags, f"--prompt={instruction}"],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "OPENAI_API_KEY": endpoint.key,
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_tok),
                "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",  # keep-alives are no chunks to it
                "QWEN_STREAM_MAX_LIFETIME_MS": "0",
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                "QWEN_CODE_NO_RELAUNCH": "true",  # one process, not one that starts another
            },
            files={".qwen/settings.json": json.dumps(settings).encode(), **placed.files},
        )

    def chain(self, view: RequestView) -> str:
        return ""

    def role(self, view: RequestView) -> Role:
        if not view.tools and "<state_snapshot>" in view.system:
            return Role.COMPACTION
        return role_of(view)

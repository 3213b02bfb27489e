"""pi 0.73.1 (npm @mariozechner/pi-coding-agent): four tools, one conversation, no sub-agents.

Its configuration is a file below HOME that names our proxy as the only provider; it speaks OpenAI
Chat Completions here. It sends no session id, so calls are told apart by URL prefix and key.
Invariant: nothing leaves the sandbox but requests to the endpoint (PI_OFFLINE, no telemetry).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

VERSION = "0.73.1"
PROVIDER = "proxy"


@dataclass(frozen=True)
class Pi:
    """Adapter of the `pi` program in the image of the same name."""

    name: str = "pi"
    protocol: str = "openai-chat"
    image: str = "pi"
    mcp: bool = False

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        model = {
            "id": endpoint.model,
            "name": endpoint.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": endpoint.window_tok,
            "maxTokens": endpoint.max_tok,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": f"{endpoint.base_url}/v1",
            "api": "openai-completions",
            "apiKey": endpoint.key,
            "models": [model],
        }
        # A message that starts like an option or like a file (@) would be taken for one.
        message = f" {instruction}" if instruction.startswith(("-", "@")) else instruction
        return LaunchPlan(
            argv=["pi", "-p", "--provider", PROVIDER, "--model", endpoint.model, message],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "PI_OFFLINE": "1",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_TELEMETRY": "0",
            },
            files={
                ".pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}}).encode()
            },
        )

    def chain(self, view: RequestView) -> str:
        return MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        return role_of(view)

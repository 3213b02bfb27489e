"""opencode 1.18.33 (npm opencode-ai): Chat Completions, always streaming; a native binary.

One configuration file names our proxy as the only provider. It asks for a title of the session
before the first call. Sessions have ids in headers, and a sub-agent's session names its parent.
Invariant: nothing leaves the sandbox but requests to the endpoint (no updates, no model list).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import Placed, place
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

VERSION = "1.18.33"
PROVIDER = "proxy"
RUN = 'printf %s "$1" | opencode run --format json'  # an argument would arrive in quotes
CONFIG = ".config/clawgym/opencode.json"
OFF = (
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS",
    "OPENCODE_DISABLE_SHARE",
)


@dataclass(frozen=True)
class OpenCode:
    """Adapter of the `opencode` program in the image of the same name."""

    name: str = "opencode"
    protocol: str = "openai-chat"
    image: str = "opencode"
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
        config = json.dumps(_config(endpoint, placed)).encode()
        return LaunchPlan(
            argv=["/bin/sh", "-c", RUN, "opencode", instruction],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "OPENCODE_CONFIG": f"{home}/{CONFIG}",
                **dict.fromkeys(OFF, "1"),
            },
            files={CONFIG: config, **placed.files},
        )

    def chain(self, view: RequestView) -> str:
        if role_of(view) is Role.TITLE:
            return "title"
        parent = view.headers.get("x-parent-session-id")
        return view.headers.get("x-session-id", MAIN_CHAIN) if parent else MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        role = role_of(view)
        if role is Role.MAIN and "x-parent-session-id" in view.headers:
            return Role.SUBAGENT
        return role


def _config(endpoint: Endpoint, placed: Placed) -> dict[str, Any]:
    model = f"{PROVIDER}/{endpoint.model}"
    limit = {"context": endpoint.window_tok, "output": endpoint.max_tok}
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "enabled_providers": [PROVIDER],
        "permission": {"*": "allow"},
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {
                    "baseURL": f"{endpoint.base_url}/v1",
                    "apiKey": endpoint.key,
                    "timeout": False,
                },
                "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
            }
        },
        "mcp": {
            name: {
                "type": "local",
                "command": [*server.argv],
                "environment": {**server.env},
                "enabled": True,
            }
            for name, server in placed.servers.items()
        },
    }

"""OpenClaw 2026.9.6 (npm openclaw): any of the three protocols, always streaming, slow to start.

Measured with the real program in its image, 4 to 18 calls a run, prompts from 8k tokens on:

    api                  call k+1 extends call k   the note on running programs stands
    openai-responses     always                    fixed, behind the first user message
    openai-completions   never: 56 tokens short    moved to the end with every call
    anthropic-messages   never: 56 tokens short    moved to the end with every call

So the Responses API is the default: one path instead of a leaf for every call. In the two others
nothing is lost either (turns continue), but each call's tail is context of its own. The note goes
away, and all three append, where `denied` holds "process" and "sessions_spawn": other tools than
it is deployed with, though. The session's id is part of the system prompt, so it is the same in
every episode: `agent exec` would make one up, and rollouts would share 5k tokens, not all. Both
have the same settings here, and no sub-agents. A malformed call makes it ask again with the same
body, or give up (exit status 1) once a tool has changed something. It compacts when a prompt was
refused for its length, by calls under another system prompt, and keeps the newest turns.
Invariant: nothing leaves the sandbox but requests to the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import place
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

VERSION = "2026.9.6"
PROVIDER = "proxy"
Api = Literal["openai-responses", "openai-completions", "anthropic-messages"]
SESSION = "episode"
RUN_S = 172_800  # its own deadlines are ours: the sandbox ends a run, the proxy a call
CALL_S = 7200
PROTOCOLS = {
    "openai-responses": "openai-responses",
    "openai-completions": "openai-chat",
    "anthropic-messages": "anthropic",
}


@dataclass(frozen=True)
class OpenClaw:
    """Adapter of `openclaw agent --local` in the image openclaw."""

    name: str = "openclaw"
    image: str = "openclaw"
    api: Api = "openai-responses"
    lean: bool = True  # fewer tools and a shorter system prompt
    denied: tuple[str, ...] = ()  # tools that it may not use
    mcp: bool = True

    @property
    def protocol(self) -> str:
        return PROTOCOLS[self.api]

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        placed = place(servers, workspace, home)
        config = self._config(endpoint, workspace)
        if servers:
            config["mcp"] = {"servers": placed.as_settings()}
        state = f"{home}/.openclaw"
        return LaunchPlan(
            argv=[
                *("openclaw", "agent", "--local", "--session-id", SESSION, "--json"),
                *("--timeout", str(RUN_S), "--message", instruction),
            ],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "OPENCLAW_STATE_DIR": state,
                "OPENCLAW_CONFIG_PATH": f"{state}/openclaw.json",
            },
            files={".openclaw/openclaw.json": json.dumps(config).encode(), **placed.files},
        )

    def _config(self, endpoint: Endpoint, workspace: str) -> dict[str, Any]:
        model = {
            "id": endpoint.model,
            "name": endpoint.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": endpoint.window_tok,
            "maxTokens": endpoint.max_tok,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        version = "" if self.api == "anthropic-messages" else "/v1"
        provider = {
            "baseUrl": endpoint.base_url + version,
            "api": self.api,
            "apiKey": endpoint.key,
            "timeoutSeconds": CALL_S,
            "models": [model],
        }
        return {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
            "agents": {
                "defaults": {
                    "model": {"primary": f"{PROVIDER}/{endpoint.model}", "fallbacks": []},
                    "workspace": workspace,
                    "skipBootstrap": True,
                    "sandbox": {"mode": "off"},
                    "experimental": {"localModelLean": self.lean},
                }
            },
            # As `openclaw agent exec` sets them.
            "tools": {
                "profile": "coding",
                "fs": {"workspaceOnly": True},
                "exec": {"mode": "full"},
                "codeMode": {"enabled": False},
                "deny": [*self.denied],
            },
            "env": {"shellEnv": {"enabled": False}},
            "update": {"checkOnStart": False},
        }

    def chain(self, view: RequestView) -> str:
        return MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        return role_of(view)

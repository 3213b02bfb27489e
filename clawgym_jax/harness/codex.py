"""Codex 0.171.0 (npm @openai/codex): OpenAI Responses, streaming; the cleanest prefixes of all.

Configured by a file in CODEX_HOME. The model's name decides which tools and instructions it sends:
"gpt-5.5" of its built-in catalogue has `apply_patch` as a freeform tool and no code mode; a name
that it does not know has no apply_patch at all. Sub-agents and compactions name themselves.
Invariant: nothing leaves the sandbox but requests to the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.mcp import place
from clawgym_jax.harness.roles import MAIN_CHAIN, role_of

VERSION = "0.171.0"
KEY_VARIABLE = "PROXY_KEY"
PARENT_HEADER = "x-codex-parent-thread-id"
AGENT_HEADER = "x-openai-subagent"
TURN_HEADER = "x-codex-turn-metadata"
IDLE_TIMEOUT_MS = 1_800_000
OFF = ("plugins", "apps", "remote_plugin")  # else it looks up hosts at its start


@dataclass(frozen=True)
class Codex:
    """Adapter of the `codex` program in the image of the same name."""

    name: str = "codex"
    protocol: str = "openai-responses"
    image: str = "codex"
    model: str = "gpt-5.5"  # what it believes to talk to
    compact_at_tok: int = 0  # context use that makes it summarise; 0: its own share of the window
    max_retries: int = 4
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
        return LaunchPlan(
            argv=["codex", "exec", "--skip-git-repo-check", "--json", "--", instruction],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "CODEX_HOME": f"{home}/.codex",
                KEY_VARIABLE: endpoint.key,
            },
            files={
                ".codex/config.toml": self._config(endpoint, placed.as_settings()).encode(),
                **placed.files,
            },
        )

    def _config(self, endpoint: Endpoint, servers: Mapping[str, Any]) -> str:
        provider = {
            "name": "proxy",
            "base_url": f"{endpoint.base_url}/v1",
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
            "request_max_retries": self.max_retries,
            "stream_max_retries": self.max_retries,
            "stream_idle_timeout_ms": IDLE_TIMEOUT_MS,
        }
        settings: dict[str, Any] = {
            "model": self.model,
            "model_provider": "proxy",
            "model_context_window": endpoint.window_tok,
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "model_providers": {"proxy": provider},
            "analytics": {"enabled": False},
            "otel": {"exporter": "none"},
            "feedback": {"enabled": False},
            "history": {"persistence": "none"},
            "features": dict.fromkeys(OFF, False),
        }
        if self.compact_at_tok:
            settings["model_auto_compact_token_limit"] = self.compact_at_tok
        if servers:
            settings["mcp_servers"] = servers
        return "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items())

    def chain(self, view: RequestView) -> str:
        if PARENT_HEADER in view.headers or AGENT_HEADER in view.headers:
            return view.headers.get("thread-id", "")
        return MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        if _turn_metadata(view).get("request_kind") == "compaction":
            return Role.COMPACTION
        if PARENT_HEADER in view.headers or AGENT_HEADER in view.headers:
            return Role.SUBAGENT
        return role_of(view)


def _turn_metadata(view: RequestView) -> Mapping[str, Any]:
    try:
        found = json.loads(view.headers.get(TURN_HEADER, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _toml(value: Any) -> str:
    """A value as TOML writes it in one line; JSON's strings, lists and numbers are TOML's too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)

"""Codex 0.171.0 (npm @openai/codex): OpenAI Responses, streaming; it only ever appends.

Configured by a file in CODEX_HOME. The model's name decides which tools and instructions it sends:
of the names in its catalogue, "gpt-5.5" is the one without code mode and with `apply_patch` as a
freeform tool; under a name that it does not know there is no apply_patch. Sub-agents and
compactions name themselves in headers. It cannot be told how many tokens an answer may have.
Invariant: nothing leaves the sandbox but requests to the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
CALL_MS = 7_200_000  # without an event in a stream; the proxy ends a call that takes too long
RESULT_TOK = 10_000  # of a tool, by its own estimate; what its catalogue says for every model
CATALOGUE = ".codex/codex_catalog.py"
PROGRAMS = Path(__file__).parent / "programs"
OFF = ("plugins", "apps", "remote_plugin")  # else it looks up hosts at its start


@dataclass(frozen=True)
class Codex:
    """Adapter of the `codex` program in the image of the same name."""

    name: str = "codex"
    protocol: str = "openai-responses"
    image: str = "codex"
    model: str = "gpt-5.5"  # what it believes to talk to
    search_tools: bool = False  # True: sub-agents and servers' tools are found by searching only
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
        first, own = [], []
        if not self.search_tools:
            catalogue = f"{home}/.codex/catalogue.json"
            first = ["python3", "-I", "-S", f"{home}/{CATALOGUE}", self.model, catalogue]
            own = ["-c", f"model_catalog_json={_toml(catalogue)}"]
        return LaunchPlan(
            argv=[
                *(*first, "codex", "exec", *own),
                *("--skip-git-repo-check", "--json", "--", instruction),
            ],
            env={
                "PATH": "/opt/harness/node_modules/.bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "CODEX_HOME": f"{home}/.codex",
                KEY_VARIABLE: endpoint.key,
            },
            files={
                CATALOGUE: (PROGRAMS / "codex_catalog.py").read_bytes(),
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
            "stream_idle_timeout_ms": CALL_MS,
        }
        # It compacts only between two calls, and gives up where a prompt is refused for its length:
        # an answer and the result of a tool must fit into what is left.
        result_tok = min(RESULT_TOK, endpoint.window_tok // 4)
        answer_tok = min(endpoint.max_tok, endpoint.window_tok // 4)
        settings: dict[str, Any] = {
            "model": self.model,
            "model_provider": "proxy",
            "model_context_window": endpoint.window_tok,
            "model_auto_compact_token_limit": endpoint.window_tok - answer_tok - result_tok,
            "tool_output_token_limit": result_tok,
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
        if servers:
            settings["mcp_servers"] = servers
        return "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items())

    def chain(self, view: RequestView) -> str:
        return view.headers.get("thread-id", "") if _is_below(view) else MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        kind = _turn_metadata(view).get("request_kind")
        if kind == "compaction":
            return Role.COMPACTION
        if _is_below(view):
            return Role.SUBAGENT
        return Role.MAIN if kind == "turn" else role_of(view)


def _is_below(view: RequestView) -> bool:
    """Whether another thread started this one."""
    return PARENT_HEADER in view.headers or AGENT_HEADER in view.headers


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

"""Any harness that somebody starts by hand: told apart by the generic rules, never launched here.

Invariant: has no opinion of its own on chains, so that system prompts tell agents apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import role_of


@dataclass(frozen=True)
class Generic:
    """For `launch/serve.py`, and for harnesses without an adapter."""

    name: str = "generic"
    protocol: str = "any"
    image: str = ""
    mcp: bool = False

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        raise ConfigError(
            "harness 'generic' cannot be started: it stands for a program that you start yourself "
            "at launch/serve.py; for rollouts name an adapter"
        )

    def chain(self, view: RequestView) -> str:
        return ""

    def role(self, view: RequestView) -> Role:
        return role_of(view)

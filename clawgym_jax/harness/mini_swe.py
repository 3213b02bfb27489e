"""mini-swe-agent 2.4.6 (PyPI): Chat Completions without streaming, one tool, one conversation.

Told by its environment and by flags on top of its own mini.yaml. It asks until a command prints
its closing line; a turn without a tool call is dropped from its history. The context window cannot
be told; a prompt beyond it ends the run.
Invariant: nothing leaves the sandbox but requests to the endpoint (no price list).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.interfaces import Endpoint, LaunchPlan, McpServer, RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.harness.roles import MAIN_CHAIN

VERSION = "2.4.6"
CLOSING = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # a command that prints it ends the run
PYTHON_DIR = "/opt/harness/python"


@dataclass(frozen=True)
class MiniSwe:
    """Adapter of the `mini` program in the image mini-swe-agent."""

    name: str = "mini_swe"
    protocol: str = "openai-chat"
    image: str = "mini-swe-agent"
    max_turns: int = 100
    attempts: int = 10  # requests sent for one call before giving up
    command_timeout_s: int = 60
    mcp: bool = False

    def launch(
        self,
        endpoint: Endpoint,
        instruction: str,
        workspace: str,
        home: str,
        servers: Sequence[McpServer] = (),
    ) -> LaunchPlan:
        settings = (
            f"model.model_kwargs.max_tokens={endpoint.max_tok}",
            "model.model_kwargs.timeout=86400",
            f"agent.step_limit={self.max_turns}",
            f"environment.timeout={self.command_timeout_s}",
        )
        flags = ["-y", "--exit-immediately", "-l", "0", "-o", f"{home}/trajectory.json"]
        for setting in ("mini.yaml", *settings):
            flags += ["-c", setting]
        program = ["python3", "-m", "minisweagent", "-m", f"openai/{endpoint.model}"]
        return LaunchPlan(
            argv=[*program, *flags, f"--task={instruction}"],
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "LANG": "C.UTF-8",
                "PYTHONPATH": PYTHON_DIR,
                "PYTHONDONTWRITEBYTECODE": "1",
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": f"{home}/.config/mini-swe-agent",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self.attempts),
                "MSWEA_SILENT_STARTUP": "1",
            },
        )

    def chain(self, view: RequestView) -> str:
        return MAIN_CHAIN

    def role(self, view: RequestView) -> Role:
        return Role.MAIN

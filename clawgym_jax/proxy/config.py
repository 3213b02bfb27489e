"""What can be set on the proxy. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.proxy.matching import HistoryMode
from clawgym_jax.proxy.tool_calls import parser_named


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    history: HistoryMode = "restore"  # a turn's dropped reasoning is put back, or forks the path
    parser: str = "qwen3"  # of reasoning and tool calls in completions: tool_calls.PARSERS
    retry_grace_s: float = 30.0  # how long an answer waits for a client that went away
    keepalive_s: float = 5.0  # between signs of life in a stream
    engine_wait_s: float = 300.0  # how long a restarting or busy engine is hidden
    settle_interval_s: float = 0.01  # between two counts of the records
    settle_checks: int = 3  # equal counts that make an episode settled
    settle_timeout_s: float = 10.0
    cancel_timeout_s: float = 5.0  # how long a cancelled request may take to return
    max_body_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.history not in ("restore", "branch"):
            raise ConfigError(f'history: expected "restore" or "branch", got {self.history!r}')
        parser_named(self.parser)
        for name in ("keepalive_s", "settle_interval_s", "settle_checks", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")

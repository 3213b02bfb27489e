"""What opens an episode at the proxy, and what is left of it when it closes.

Not here: the life in between (session.py). Invariant: a trace is complete; its calls have their
final delivery and its ledger is the sum of theirs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.interfaces import Harness, Sampler
from clawgym_jax.core.types import CallRecord, SamplingParams
from clawgym_jax.proxy.ledger import PromptLedger

MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Who runs, who samples, and how. The sampling here wins over what a harness asks for."""

    episode_id: str
    harness: Harness
    sampler: Sampler
    sampling: SamplingParams
    window_tok: int
    max_tok: int
    seed: int = 0
    on_policy: bool = True  # training: log-probs must be those of the distribution sampled from
    call_prefix: str = ""  # of call ids; default the episode id. A rerun needs another one
    key: str = ""  # default a random one

    def __post_init__(self) -> None:
        odd = not all(c.isalnum() or c in "-_." for c in self.episode_id)
        if odd or not self.episode_id.strip("."):  # clients take . and .. out of a URL
            raise ConfigError(
                "episode_id: expected letters, digits, '-', '_' and '.', not only dots, got "
                f"{self.episode_id!r}"
            )
        plain = all(c.isascii() and (c.isalnum() or c in "-_.") for c in self.key)
        if self.key and (len(self.key) < MIN_KEY_CHARS or not plain):
            raise ConfigError(
                f"key: expected at least {MIN_KEY_CHARS} letters, digits, '-', '_' and '.', got "
                f"{len(self.key)} characters; leave it out for a random one"
            )
        s = self.sampling
        if self.on_policy and (s.top_p, s.top_k, s.min_p) != (1.0, 0, 0.0):
            raise ConfigError(
                "top_p, top_k and min_p must be off in training runs (1, 0, 0), got "
                f"({s.top_p}, {s.top_k}, {s.min_p}); use temperature, or evaluate instead"
            )
        if self.on_policy and s.temperature <= 0:
            raise ConfigError(
                f"temperature: expected more than 0 in training runs, got {s.temperature}"
            )


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """All calls of a closed episode."""

    calls: tuple[CallRecord, ...]  # by ordinal, with final delivery
    ledger: PromptLedger
    model_s: float  # time spent in the engine, added up over calls
    overhead_s: float  # the proxy's own time, added up over requests
    causes: Counter[str] = field(default_factory=Counter)  # prefix breaks, hidden faults, ...
    quarantine: str = ""  # why nothing of this episode may be trained on

    @property
    def failure(self) -> str:
        """Why the episode is an infrastructure failure; empty where it is none."""
        if self.quarantine:
            return self.quarantine
        return "" if self.calls else "0 calls captured"

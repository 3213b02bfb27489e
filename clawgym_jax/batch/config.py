"""How episodes become a batch: every choice in one place.

Not here: the loss's own numbers (`train.step`). Invariant: an unknown name is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.losses.advantage import GroupConfig
from clawgym_jax.losses.correction import CorrectionConfig
from clawgym_jax.tree.filters import FilterConfig
from clawgym_jax.tree.pack import PackConfig

# Weights W of the tree loss; |B| rollouts in the minibatch, Z_i trainable tokens in rollout i.
ROLLOUT_MEAN = "rollout_mean"  # 1 / (|B| Z_i): the paper's rule, each token once
TOKEN_MEAN = "token_mean"  # 1 / sum_i Z_i
PATH_SUM = "path_sum"  # leaves below the token's call / |B|: as if each path were trained alone
WEIGHTINGS = (ROLLOUT_MEAN, TOKEN_MEAN, PATH_SUM)

GRPO = "grpo"  # advantages from the rewards of a group
PPO = "ppo"  # advantages from values (`scored.set_values`); no groups
ALGORITHMS = (GRPO, PPO)


@dataclass(frozen=True)
class BatchConfig:
    """path_sum does not divide by Z_i: a path's tokens add up, so long rollouts weigh more."""

    pack: PackConfig = field(default_factory=PackConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    weighting: str = ROLLOUT_MEAN
    algorithm: str = GRPO
    group: GroupConfig = field(default_factory=GroupConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    gamma: float = 1.0  # of PPO; the paper's values
    lam: float = 1.0
    whiten_advantages: bool = False  # PPO: mean 0, deviation 1 over a minibatch's trained tokens
    auxiliary_weight: float = 1.0  # times the advantage of auxiliary calls, where they are trained
    replay_routes: bool = False  # experts as the engine recorded them (engine.routing)

    def __post_init__(self) -> None:
        for name, allowed in (("weighting", WEIGHTINGS), ("algorithm", ALGORITHMS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"batch.{name}: unknown {getattr(self, name)!r}; expected one of "
                    f"{', '.join(allowed)}"
                )
        if self.auxiliary_weight < 0:
            raise ConfigError(
                f"batch.auxiliary_weight: expected at least 0, got {self.auxiliary_weight}"
            )
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"batch.{name}: expected a number in [0, 1], got {getattr(self, name)}"
                )

"""Group-relative advantages: who is in a baseline, who is in the loss.

One group = the rollouts of one (task, harness) pair; a rollout counts once, however many branches
its tree has. Not here: weights of tokens (`batch.from_episodes`).
Invariant: the advantages of a group that is kept sum to zero.
Source: ClawGym II, GRPO with population standard deviation; group rules of the shared definitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

UNGRADED = "no reward"
SMALL_GROUP = "group with fewer than two graded rollouts"
NO_TOKEN = "no trainable token"


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Per rollout; `out` says why a rollout is not in the loss ("" = it is)."""

    advantage: np.ndarray  # f32[B], 0 for rollouts that are out
    out: tuple[str, ...]
    counts: Counter[str]  # rollouts by reason, and "zero-variance groups", "groups"

    @property
    def in_loss(self) -> np.ndarray:
        """bool[B]"""
        return np.array([reason == "" for reason in self.out], bool)


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    trainable_tok: Sequence[int],
    *,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """A_i = (R_i - mean) / (std + eps), population std over the group's graded rollouts.

    rewards: None = ungraded or infrastructure failure: in neither baseline nor loss.
    trainable_tok: 0 = stays in the baseline, leaves the loss.
    """
    if not len(rewards) == len(groups) == len(trainable_tok):
        raise ValueError(
            f"expected one reward, group and token count per rollout, got {len(rewards)}, "
            f"{len(groups)}, {len(trainable_tok)}"
        )
    advantage = np.zeros(len(rewards), np.float32)
    out = [UNGRADED if r is None else "" for r in rewards]
    counts: Counter[str] = Counter()
    for group in dict.fromkeys(groups):
        members = [i for i, g in enumerate(groups) if g == group and rewards[i] is not None]
        if len(members) < 2:
            for i in members:
                out[i] = SMALL_GROUP
            counts["dropped groups"] += 1
            continue
        values = np.array([rewards[i] for i in members], np.float64)
        centred = values - values.mean()
        if scale_by_std:
            centred = centred / (values.std() + eps)
        advantage[members] = centred.astype(np.float32)
        counts["groups"] += 1
        counts["zero-variance groups"] += int(values.std() < eps)
        for i in members:
            if trainable_tok[i] == 0:
                out[i], advantage[i] = NO_TOKEN, 0.0
    counts.update(reason for reason in out if reason)
    return GroupAdvantages(advantage, tuple(out), counts)

"""Group-relative advantages: who is in a baseline, who is in the loss.

One group = the rollouts of one (task, harness) pair; a rollout counts once, however many branches
its tree has. Not here: weights of tokens (`batch.weights`), advantages from values (`gae`).
Invariant: before rollouts without a trainable token leave, a group's advantages sum to zero.
Source: ClawGym II, GRPO with population standard deviation; group rules of the shared definitions.
Options: no scaling by the deviation (Dr. GRPO, Liu et al. 2025), leave-one-out baseline (RLOO,
Ahmadian et al. 2024), groups without variance left out (dynamic sampling, DAPO, Yu et al. 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

UNGRADED = "no reward"
SMALL_GROUP = "group with fewer than two graded rollouts"
NO_TOKEN = "no trainable token"
ZERO_VARIANCE = "zero-variance group"
UNIFORM = 1e-6  # a group whose rewards differ by no more has no variance


@dataclass(frozen=True)
class GroupConfig:
    """How rewards of a group become advantages."""

    scale_by_std: bool = True  # False: Dr. GRPO
    leave_one_out: bool = False  # the baseline of a rollout is the mean of the others
    drop_uniform: bool = False  # groups without variance leave the loss and |B|
    eps: float = 1e-6  # added to the deviation


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Per rollout; `out` says why a rollout is not in the loss ("" = it is)."""

    advantage: np.ndarray  # f32[B], 0 for rollouts that are out
    out: tuple[str, ...]
    counts: Counter[str]  # rollouts by reason; "groups", "dropped groups", "zero-variance groups"

    @property
    def in_loss(self) -> np.ndarray:
        """bool[B]"""
        return np.array([reason == "" for reason in self.out], bool)


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    trainable_tok: Sequence[int],
    config: GroupConfig = GroupConfig(),
    masked: Sequence[str] | None = None,
) -> GroupAdvantages:
    """A_i = (R_i - baseline) / (std + eps), population std over the group's graded rollouts.

    rewards: None = ungraded or infrastructure failure: in neither baseline nor loss.
    trainable_tok: 0 = stays in the baseline, leaves the loss.
    masked: why a rollout is in neither baseline nor loss although it has a reward; "" = it is in.
    """
    advantage = np.zeros(len(rewards), np.float32)
    out = ungraded(rewards, trainable_tok, masked)
    if len(groups) != len(rewards):
        raise ValueError(f"expected a group per rollout, got {len(groups)} of {len(rewards)}")
    counts = Counter({"groups": 0, "dropped groups": 0, "zero-variance groups": 0})
    members_of: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        if out[i] in ("", NO_TOKEN):
            members_of.setdefault(group, []).append(i)
    counts["dropped groups"] = len(set(groups) - members_of.keys())
    for members in members_of.values():
        if len(members) < 2:
            out[members[0]] = SMALL_GROUP
            counts["dropped groups"] += 1
            continue
        counts["groups"] += 1
        values = np.array([rewards[i] for i in members], np.float64)
        if np.ptp(values) <= UNIFORM:
            counts["zero-variance groups"] += 1
            if config.drop_uniform:
                out = [ZERO_VARIANCE if i in members and not w else w for i, w in enumerate(out)]
            continue
        advantage[members] = _centred(values, config)
    advantage[[i for i, why in enumerate(out) if why]] = 0.0
    counts.update(reason for reason in out if reason)
    return GroupAdvantages(advantage, tuple(out), counts)


def ungraded(
    rewards: Sequence[float | None],
    trainable_tok: Sequence[int],
    masked: Sequence[str] | None = None,
) -> list[str]:
    """Why each rollout is out whatever its group is; "" = it is in. Also the rule of PPO."""
    masked = [""] * len(rewards) if masked is None else masked
    if not len(rewards) == len(trainable_tok) == len(masked):
        raise ValueError(
            f"expected one reward, token count and mask per rollout, got {len(rewards)}, "
            f"{len(trainable_tok)}, {len(masked)}"
        )
    return [
        why or (UNGRADED if reward is None else "" if tokens else NO_TOKEN)
        for reward, tokens, why in zip(rewards, trainable_tok, masked, strict=True)
    ]


def _centred(values: np.ndarray, config: GroupConfig) -> np.ndarray:
    """f64[n] of one group that has variance."""
    centred = values - values.mean()
    if config.leave_one_out:  # R_i - mean of the others = n / (n - 1) (R_i - mean)
        centred = centred * len(values) / (len(values) - 1)
    if config.scale_by_std:
        centred = centred / (values.std() + config.eps)
    return np.asarray(centred)

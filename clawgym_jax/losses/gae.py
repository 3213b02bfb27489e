"""Generalised advantage estimation on a rollout's tree of calls, in float64 on the host.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

Time steps are sampled tokens; environment tokens between two calls are none. The reward arrives
after the last token of each leaf call. Behind a call that several calls extend, V_{t+1} and A_{t+1}
are means over those calls, weighted by the leaves below each (mean backup), so every token has one
advantage whatever the number of paths through it.
Not here: which calls extend which (`batch.call_tree`), values themselves, whitening.
Invariant: gamma = lambda = 1 gives A = R - V and returns R exactly, on any tree.
Source: Schulman et al. 2016, equation 16; ClawGym II trains PPO with gamma = lambda = 1, the
backup at branches is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_PARENT = -1


def tree_gae(
    values: Sequence[np.ndarray],
    parents: Sequence[int],
    leaves: Sequence[int],
    reward: float,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """-> (advantages, returns), f64[C] of each call; returns are the value targets A + V.

    values: f[C] per call, V of the state before each sampled token; C > 0.
    parents: the call that each call's prompt runs through last, NO_PARENT at roots; an earlier one.
    leaves: how many leaf calls are at or below each call.
    """
    _check(values, parents, leaves)
    states = [np.asarray(v, np.float64) for v in values]
    if gamma == 1.0 and lam == 1.0:
        return [reward - v for v in states], [np.full(len(v), reward, np.float64) for v in states]
    advantages: list[np.ndarray] = [np.zeros(0)] * len(states)
    next_value, next_advantage = np.zeros(len(states)), np.zeros(len(states))  # behind each call
    for c in range(len(states) - 1, -1, -1):  # children come after their parents
        leaf = c not in parents
        own = _backward(
            states[c],
            reward if leaf else gamma * next_value[c],
            0.0 if leaf else next_advantage[c],
            gamma,
            gamma * lam,
        )
        advantages[c] = own
        if parents[c] != NO_PARENT:
            below = sum(n for n, p in zip(leaves, parents, strict=True) if p == parents[c])
            next_value[parents[c]] += leaves[c] / below * states[c][0]
            next_advantage[parents[c]] += leaves[c] / below * own[0]
    return advantages, [a + v for a, v in zip(advantages, states, strict=True)]


def _backward(
    values: np.ndarray, target: float, advantage: float, gamma: float, decay: float
) -> np.ndarray:
    """One call, last token first. target: r + gamma V behind its last token. f64[C]"""
    delta = np.append(gamma * values[1:], target) - values
    out = np.empty_like(values)
    for t in range(len(values) - 1, -1, -1):
        advantage = delta[t] + decay * advantage
        out[t] = advantage
    return out


def _check(values: Sequence[np.ndarray], parents: Sequence[int], leaves: Sequence[int]) -> None:
    if not len(values) == len(parents) == len(leaves):
        raise ValueError(
            f"expected values, a parent and a leaf count per call, got {len(values)}, "
            f"{len(parents)}, {len(leaves)}"
        )
    for c, (v, parent) in enumerate(zip(values, parents, strict=True)):
        if not NO_PARENT <= parent < c:
            raise ValueError(
                f"call {c}: expected an earlier call or {NO_PARENT} as parent, got {parent}"
            )
        if np.ndim(v) != 1 or not len(v):
            raise ValueError(f"call {c}: expected values f[C] with C > 0, got shape {np.shape(v)}")

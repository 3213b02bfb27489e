"""Generalised advantage estimation over a rollout's calls, in float64 on the host.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

Time steps are sampled tokens; environment tokens between two calls are none, and neither is a
change to what the model is shown: time goes on from a call to the calls that extend it or present
its turn again behind changed context. The reward arrives after the last token of each call that
nothing goes on from. Behind a call that several calls go on from, V_{t+1} and A_{t+1} are means
over those, weighted by the ends that each leads to (mean backup), so every token has one advantage
whatever the number of ways through it. A call may go on from several (merged turns): each of them
backs up from it.
Not here: which calls go on from which (`batch.call_tree`), values themselves, whitening.
Invariant: gamma = lambda = 1 gives A = R - V and returns R exactly, in any order of calls.
Source: Schulman et al. 2016, equation 16; ClawGym II trains PPO with gamma = lambda = 1, the
backup at branches is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def tree_gae(
    values: Sequence[np.ndarray],
    before: Sequence[Sequence[int]],
    ends: Sequence[int],
    reward: float,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """-> (advantages, returns), f64[C] of each call; returns are the value targets A + V.

    values: f[C] per call, V of the state before each sampled token; C > 0.
    before: the calls that each call goes on from, all earlier ones; none where it starts anew.
    ends: how many calls that nothing goes on from are at or after each call.

    Three calls of one token, V = a, b, c, each presenting the turns before it again behind changed
    context: before = [[], [0], [1]], ends = [1, 1, 1], and the advantages are those of the chain,
    A_2 = R - c, A_1 = gamma c - b + gamma lambda A_2, A_0 = gamma b - a + gamma lambda A_1.
    """
    _check(values, before, ends)
    states = [np.asarray(v, np.float64) for v in values]
    if gamma == 1.0 and lam == 1.0:
        return [reward - v for v in states], [np.full(len(v), reward, np.float64) for v in states]
    total = np.zeros(len(states))  # of the ends of the calls that go on from each
    for c, calls in enumerate(before):
        for b in calls:
            total[b] += ends[c]
    advantages: list[np.ndarray] = [np.zeros(0)] * len(states)
    next_value, next_advantage = np.zeros(len(states)), np.zeros(len(states))  # behind each call
    for c in range(len(states) - 1, -1, -1):  # what goes on from a call comes after it
        goes_on = total[c] > 0
        target = gamma * next_value[c] if goes_on else reward
        own = _backward(states[c], target, next_advantage[c], gamma, gamma * lam)
        advantages[c] = own
        for b in before[c]:
            next_value[b] += ends[c] / total[b] * states[c][0]
            next_advantage[b] += ends[c] / total[b] * own[0]
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


def _check(
    values: Sequence[np.ndarray], before: Sequence[Sequence[int]], ends: Sequence[int]
) -> None:
    if not len(values) == len(before) == len(ends):
        raise ValueError(
            "expected values, the calls before and a count of ends per call, got "
            f"{len(values)}, {len(before)}, {len(ends)}"
        )
    for c, (v, calls) in enumerate(zip(values, before, strict=True)):
        if not all(0 <= b < c for b in calls) or len(set(calls)) < len(calls):
            raise ValueError(f"call {c}: expected different earlier calls before it, got {calls}")
        if ends[c] < 1:
            raise ValueError(f"call {c}: expected at least one end at or after it, got {ends[c]}")
        if np.ndim(v) != 1 or not len(v):
            raise ValueError(f"call {c}: expected values f[C] with C > 0, got shape {np.shape(v)}")

"""A group of forks from one prompt, with a chosen number of times that tokens are shared.

With K = 2 s rollouts the prompt that all begin with is the share (s - 1) / (K - 1) of the tree's
tokens; then the tokens of all paths are s times those of the tree, and two paths are as long as the
tree. A rollout is two calls: a completion, a tool result, a completion, of a third each, rounded
up to whole tokens.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.core.types import CallRecord, Span
from experiments.bench.tree_parts.structure import make_call


def forks(tokens: int, sharing: int) -> list[list[CallRecord]]:
    """The calls of 2 * sharing rollouts; their tree has `tokens` tokens."""
    number = 2 * sharing
    third = -(-tokens * (number - sharing) // ((number - 1) * number * 3))  # rounded up
    trunk = np.arange(tokens - 3 * third * number, dtype=np.int32)
    out = []
    for r in range(number):
        parts = (
            len(trunk) + third * (3 * r + np.arange(3)[:, None]) + np.arange(third)
        )  # [3, third]
        said, result, last = parts.astype(np.int32)
        name = f"r{r}"
        history = np.concatenate([trunk, said, result])
        span = Span(len(trunk), third, f"{name}.0")
        again = (f"{name}.0",)
        out.append(
            [
                make_call(name, 0, trunk, said),
                make_call(name, 1, history, last, (span,), continues=again),
            ]
        )
    return out

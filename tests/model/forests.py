"""Random packed rows for the attention tests: forests in depth-first order, with padding."""

import numpy as np
from hypothesis import strategies as st


def end_of(parents: list[int]) -> np.ndarray:
    """i32[N]: exclusive end of each token's subtree, from parents in depth-first order."""
    end = np.arange(1, len(parents) + 1, dtype=np.int32)
    for child in range(len(parents) - 1, -1, -1):
        if parents[child] >= 0:
            end[parents[child]] = max(end[parents[child]], end[child])
    return end


def grow(rng: np.random.Generator, length: int, padding: int, branching: float) -> list[int]:
    """Parents of `length` tokens, the last `padding` of which are roots without children."""
    parents: list[int] = []
    path: list[int] = []  # ancestors of the next token, root first
    for token in range(length):
        if token >= length - padding:
            parents.append(-1)
            continue
        if path and rng.random() < branching:
            path = path[: rng.integers(0, len(path) + 1)]  # branch off, or start a new tree
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


@st.composite
def forests(draw: st.DrawFn, length: int) -> np.ndarray:
    """i32[2, length]: `end` of two rows, with trees and padding in each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(2):
        padding = draw(st.integers(0, length))
        branching = draw(st.sampled_from([0.0, 0.05, 0.3]))
        rows.append(end_of(grow(rng, length, padding, branching)))
    return np.stack(rows)

"""Token ids: i32 vectors, compared.

Invariant: pure functions of their arguments.
"""

from __future__ import annotations

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two vectors."""
    length = min(a.size, b.size)
    if not length or a[0] != b[0]:  # most pairs part at once
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length

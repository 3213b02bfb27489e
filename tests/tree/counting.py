"""Counts what trees compare, so that a test can hold them to it on any machine."""

from __future__ import annotations

import numpy as np
import pytest

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.tree import prefix_tree, segments


class Comparisons:
    """Counts comparisons of tokens, and how many of them were compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.compared_tok = 0
        for module in (prefix_tree, segments):
            monkeypatch.setattr(module, "common_prefix", self._counted)

    def _counted(self, a: np.ndarray, b: np.ndarray) -> int:
        common = common_prefix(a, b)
        self.count += 1
        self.compared_tok += min(a.size, b.size) if common else 1
        return common

"""Pass@1 per harness, with an interval and with everything that was left out.

'Pass@1' as published for ClawGym-Bench is the mean of the continuous score; the share of runs with
score 1 is reported beside it (for the toy tasks, whose score is 0 or 1, they are the same).
Not here: running episodes. Invariant: ungraded episodes are counted, never scored 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_jax.core.types import Episode, EpisodeRecord

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Score:
    """One harness's result."""

    mean: float  # of the continuous score
    full: float  # share of episodes with score 1
    low: float  # 95 % Wilson interval of `full`
    high: float
    graded: int
    ungraded: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def score_by_harness(episodes: Sequence[Episode | EpisodeRecord]) -> dict[str, Score]:
    """Harness name -> Score, in order of first appearance."""
    records = [e.record if isinstance(e, Episode) else e for e in episodes]
    return {
        name: _score([r for r in records if r.harness == name])
        for name in dict.fromkeys(r.harness for r in records)
    }


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a proportion (E. B. Wilson, 1927)."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # rounding must not exclude p


def _score(records: Sequence[EpisodeRecord]) -> Score:
    values = [r.grade.score for r in records if r.grade.score is not None]
    n = len(values)
    full = sum(1 for value in values if value >= 1.0)
    low, high = wilson(full, n)
    return Score(
        mean=sum(values) / n if n else math.nan,
        full=full / n if n else math.nan,
        low=low,
        high=high,
        graded=n,
        ungraded=len(records) - n,
    )

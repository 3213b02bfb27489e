"""Pass@1 against published Wilson intervals, ungraded episodes counted apart."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.types import EpisodeRecord, Grade, Outcome
from clawgym_jax.evaluate.passk import score_by_harness, wilson


def record(harness: str, score: float | None) -> EpisodeRecord:
    return EpisodeRecord(
        run_id="r", episode_id="e", group_id="g", task_id="t", harness=harness, split="heldout",
        step=0, seed=0, outcome=Outcome.OK, detail="", grade=Grade(score), call_ids=(),
        timings_s={},
    )  # fmt: skip


def test_ungraded_episodes_are_not_scored_zero() -> None:
    scores = score_by_harness([record("a", 1.0), record("a", None), record("b", 0.5)])
    assert (scores["a"].mean, scores["a"].graded, scores["a"].ungraded) == (1.0, 1, 1)
    assert (scores["b"].mean, scores["b"].full) == (0.5, 0.0)
    assert math.isnan(score_by_harness([record("c", None)])["c"].mean)


def test_wilson_by_a_textbook_case() -> None:
    """15 of 148: Newcombe (1998), table I, method 3."""
    np.testing.assert_allclose(wilson(15, 148), (0.0624, 0.1605), atol=1e-4)
    np.testing.assert_allclose(wilson(0, 20), (0.0, 0.1611), atol=1e-4)


@given(st.integers(1, 200), st.data())
def test_the_interval_holds_the_share(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1

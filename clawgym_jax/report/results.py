"""The headline: held-out pass@1 per harness before and after training, with intervals.

Not here: the scores themselves (`evaluate.passk` wrote them into progress.json).
Invariant: a difference is shown with its interval or not at all.
Source: R. G. Newcombe, Interval estimation for the difference between independent proportions,
Statistics in Medicine 17 (1998), method 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym_jax.report.curves import Interval, interval_chart
from clawgym_jax.report.markup import Html, el, join, missing, table
from clawgym_jax.report.run_data import RunData
from clawgym_jax.report.scales import shown

Line = Mapping[str, Any]
_HOW = (
    "The change is between shares in full; its interval is Newcombe's, from the two Wilson "
    "intervals, as if the episodes were independent."
)


def headline(run: RunData) -> Html:
    """Held-out pass@1 per harness, before and after."""
    before, after = run.progress.get("before") or {}, run.progress.get("after") or {}
    names = list(dict.fromkeys([*before, *after]))
    if not names:
        return missing(
            "No held-out evaluation yet: it is run before the first and after the last step, if "
            "the experiment has held-out tasks."
        )
    rows = [_result_row(name, before.get(name), after.get(name)) for name in names]
    head = ["harness", "before", "after", "change", "95 % interval of the change", "graded",
            "ungraded"]  # fmt: skip
    note = "share of held-out episodes with full score; bars: 95 % Wilson intervals"
    intervals = [Interval(n, _share(before.get(n)), _share(after.get(n))) for n in names]
    return join(
        None if after else missing("Not evaluated after training yet: the run is not done."),
        interval_chart("Held-out pass@1", note, intervals),
        table(head, rows, "Held-out pass@1, mean score (95 % interval of the share in full)"),
        el("p", _HOW, class_="soft") if before and after else None,
    )


def _result_row(name: str, before: Line | None, after: Line | None) -> list[str]:
    cells = [_score(before), _score(after)]
    if before is None or after is None:
        cells += ["–", "–"]
    else:
        low, high = newcombe(before, after)
        cells += [f"{after['full'] - before['full']:+.3f}", f"{low:+.2f} to {high:+.2f}"]
    last = after or before or {}
    return [name, *cells, shown(last.get("graded")), shown(last.get("ungraded"))]


def newcombe(before: Line, after: Line) -> tuple[float, float]:
    """Interval of after - before from two Wilson intervals (R. G. Newcombe, 1998, method 10)."""
    a, b = before["full"], after["full"]
    low = b - a - ((b - after["low"]) ** 2 + (before["high"] - a) ** 2) ** 0.5
    high = b - a + ((after["high"] - b) ** 2 + (a - before["low"]) ** 2) ** 0.5
    return max(-1.0, low), min(1.0, high)


def _score(score: Line | None) -> str:
    if not score or not score.get("graded"):
        return "–"
    return f"{score['mean']:.3f} ({score['low']:.2f} to {score['high']:.2f})"


def _share(score: Line | None) -> tuple[float, float, float] | None:
    if not score or not score.get("graded"):
        return None
    return score["full"], score["low"], score["high"]

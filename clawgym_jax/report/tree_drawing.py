"""One prefix tree as SVG: a row per call in the order of sampling, bars by token depth.

A row holds what its call added: new context (grey) and what was sampled (blue; hatched if it is
not trained). An elbow leads from the end of what it continues. Depth is compressed (square root of
each stretch), so that a 20-token answer behind 20,000 tokens of context can be seen.
Not here: which calls are dropped (`tree.filters`). Invariant: equal depth is equal x.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.report.episode_view import EpisodeView, describe
from clawgym_jax.report.markup import Html, el, join, short
from clawgym_jax.report.scales import shown
from clawgym_jax.tree.prefix_tree import CONTEXT, ROOT

_WIDTH, _EDGE = 720.0, 8.0
_ROW, _BAR = 38.0, 13.0
_TOP = 6.0
MOST_ROWS = 40


class DepthScale:
    """Token depth -> x. Piecewise linear between the borders of segments."""

    def __init__(self, borders: list[int]) -> None:
        self._borders = np.array(sorted({0, *borders}), float)
        stretches = np.sqrt(np.diff(self._borders))
        room = _WIDTH - 2 * _EDGE
        least = min(8.0, room / (2 * max(len(stretches), 1)))
        spare = room - least * len(stretches)
        widths = least + stretches * spare / max(float(stretches.sum()), 1e-9)
        self._x = _EDGE + np.concatenate([[0.0], np.cumsum(widths)])

    def __call__(self, depth: int) -> float:
        return float(np.interp(depth, self._borders, self._x))

    def ticks(self, apart: float = 44.0) -> list[int]:
        """Borders that are far enough from each other to be labelled."""
        out: list[int] = []
        for border in self._borders.astype(int).tolist():
            if not out or self(border) - self(out[-1]) >= apart:
                out.append(border)
        return out


def draw_tree(view: EpisodeView) -> Html:
    """The first MOST_ROWS calls of an episode."""
    rows = min(len(view.tree.calls), MOST_ROWS)
    drawn = [s for call in range(rows) for s in view.added[call]]
    x = DepthScale([view.tree.segments[s].end_depth for s in drawn])
    row_of = {s: call for call in range(rows) for s in view.added[call]}
    bottom = _TOP + _ROW * rows
    picture = el(
        "svg",
        _hatching(),
        (_tick(x, depth, bottom) for depth in x.ticks()),
        (_elbow(view, x, row_of, call) for call in range(rows)),
        (_row(view, x, call) for call in range(rows)),
        viewBox=f"0 0 {_WIDTH:.0f} {bottom + 22:.0f}",
        role="img",
        class_="wide",
        aria_label=_words(view, rows),
    )
    return el("div", picture, class_="scroll", tabindex=0, role="region", aria_label="prefix tree")


def _row(view: EpisodeView, x: DepthScale, call: int) -> Html:
    record = view.tree.calls[call]
    label = (
        f"call {record.ordinal} · {short(describe(record), 40)} · "
        f"{record.completion_tok} sampled · {view.verdict(call)}"
    )
    at, anchor = _label_place(view, x, call)
    return join(
        el("text", label, x=at, y=_y(call) - 4, text_anchor=anchor, class_="ink"),
        (_bar(view, x, call, s) for s in view.added[call]),
    )


def _label_place(view: EpisodeView, x: DepthScale, call: int) -> tuple[float, str]:
    """Over the row's bars: from their start, or to the drawing's end where they are far right."""
    if not view.added[call]:
        return _EDGE, "start"
    start = x(view.tree.segments[view.added[call][0]].depth)
    if start > _WIDTH / 2:
        return _WIDTH - _EDGE, "end"
    return start + (5 if start > _EDGE else 0), "start"


def _bar(view: EpisodeView, x: DepthScale, call: int, index: int) -> Html:
    segment = view.tree.segments[index]
    start, stop = x(segment.depth), x(segment.end_depth)
    kept = call not in view.selection.dropped
    kind = "context" if segment.call == CONTEXT else "sampled" if kept else "dropped"
    tip = f"{kind}, {len(segment.tokens)} tokens, depth {segment.depth} to {segment.end_depth}"
    return el(
        "rect", el("title", tip), x=start + 0.5, y=_y(call), width=max(stop - start - 1, 1.0),
        height=_BAR, rx=2, class_=kind,
    )  # fmt: skip


def _elbow(view: EpisodeView, x: DepthScale, row_of: dict[int, int], call: int) -> Html | None:
    """From the end of the segment that this call's first new segment follows."""
    if not view.added[call]:
        return None
    parent = view.tree.segments[view.added[call][0]].parent
    if parent == ROOT:
        return None
    at = x(view.tree.segments[parent].end_depth)
    top, bottom = _y(row_of[parent]) + _BAR / 2, _y(call) + _BAR / 2
    return el("path", d=f"M{at - 3:.1f},{top:.1f}H{at:.1f}V{bottom:.1f}H{at + 2:.1f}",
              class_="elbow")  # fmt: skip


def _tick(x: DepthScale, depth: int, bottom: float) -> Html:
    at = x(depth)
    anchor = "start" if depth == 0 else "end" if at > _WIDTH - 40 else "middle"
    return join(
        el("line", x1=at, x2=at, y1=_TOP, y2=bottom, class_="grid"),
        el("text", shown(depth), x=at, y=bottom + 14, text_anchor=anchor),
    )


def _hatching() -> Html:
    stroke = el("path", d="M0,6L6,0", class_="hatch")
    return el("defs", el("pattern", stroke, id="hatch", width=6, height=6,
                         patternUnits="userSpaceOnUse"))  # fmt: skip


def _words(view: EpisodeView, rows: int) -> str:
    parts = [
        f"call {view.tree.calls[c].ordinal}, {describe(view.tree.calls[c])}, adds "
        f"{len(view.environment_ids(c))} tokens of context and samples "
        f"{view.tree.calls[c].completion_tok}, {view.verdict(c)}"
        for c in range(rows)
    ]
    return f"Prefix tree of {view.tree.total_tok} tokens: {'; '.join(parts)}"


def _y(row: int) -> float:
    """Top of a row's bars."""
    return _TOP + _ROW * row + 17.0

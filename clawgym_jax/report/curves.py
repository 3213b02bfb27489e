"""Charts as inline SVG, each with its legend, a text alternative and the numbers in a table.

Drawn for 360 pixels of width, so that text keeps its size on a phone; a wide screen shows several
beside each other. Not here: which numbers (`sections`).
Invariant: a value that is missing is a gap, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawgym_jax.report.markup import Child, Html, el, fold, join, table
from clawgym_jax.report.scales import Axis, round_ticks, shown, value_axis
from clawgym_jax.report.style import SERIES

WIDTH, HEIGHT = 360.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 350.0, 10.0, 164.0
_DASHES = (None, "7 4", "2 3", "9 3 2 3", "12 4", "4 4", "1 4")
_MARKED = 40  # with more points than this the line alone is drawn
_MOST_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    values: tuple[float | None, ...]  # one per step of the chart


@dataclass(frozen=True, slots=True)
class Interval:
    """One row of the headline chart: two shares with their intervals; None = not measured."""

    name: str
    before: tuple[float, float, float] | None  # share, low, high
    after: tuple[float, float, float] | None


def line_chart(
    title: str,
    note: str,
    steps: Sequence[int],
    series: Sequence[Series],
    limit: float | None = None,
    log: bool = False,
) -> Html:
    """Lines over steps. limit: a value that must not be exceeded."""
    found = [v for s in series for v in s.values if v is not None]
    y = value_axis([*found, *([limit] if limit else [])], _BOTTOM, _TOP, log)
    x = _step_axis(steps)
    drawn = [_line(s, i % SERIES, steps, x, y) for i, s in enumerate(series)]
    if limit:
        drawn.append(_rule(y(limit), "limit"))
        label = f"limit {shown(limit)}"
        drawn.append(el("text", label, x=_RIGHT, y=y(limit) - 4, text_anchor="end"))
    legend = _legend([s.name for s in series], _line_key) if len(series) > 1 else None
    return _figure(
        title, note, _svg(_describe(title, steps, series), _axes(x, y, steps), drawn), legend,
        _numbers(title, steps, series),
    )  # fmt: skip


def stacked_columns(title: str, note: str, steps: Sequence[int], parts: Sequence[Series]) -> Html:
    """A column per step (or per few steps, by their mean), parts one upon the other."""
    shown_steps, heights = _bins(steps, parts)
    y = value_axis([sum(column) for column in heights], _BOTTOM, _TOP)
    x = _step_axis(steps, 8.0)
    width = min(28.0, max(1.5, (_RIGHT - _LEFT - 16) / len(shown_steps) * 0.8))
    drawn = [
        _column(x(step), width, column, y)
        for step, column in zip(shown_steps, heights, strict=True)
    ]
    return _figure(
        title, note, _svg(_describe(title, steps, parts), _axes(x, y, steps), drawn),
        _legend([p.name for p in parts], _block_key),
        _numbers(title, steps, parts),
    )  # fmt: skip


def interval_chart(title: str, note: str, rows: Sequence[Interval]) -> Html:
    """Shares between 0 and 1: a ring before training, a dot after it, bars for the intervals."""
    bottom = _TOP + 44.0 * len(rows)
    x = Axis(0.0, 1.0, 10.0, _RIGHT)
    drawn: list[Html] = [
        join(
            el("line", x1=x(t), x2=x(t), y1=_TOP, y2=bottom, class_="grid"),
            el("text", shown(t), x=x(t), y=bottom + 14, text_anchor="middle"),
        )
        for t in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    for k, row in enumerate(rows):
        top = _TOP + 44.0 * k
        drawn.append(el("text", row.name, x=10, y=top + 12, class_="ink"))
        drawn.append(_whisker(row.before, top + 22, x, "before"))
        drawn.append(_whisker(row.after, top + 34, x, "after"))
    words = "; ".join(f"{r.name} before {_words(r.before)}, after {_words(r.after)}" for r in rows)
    picture = el(
        "svg", drawn, viewBox=f"0 0 {WIDTH:.0f} {bottom + 20:.0f}", role="img", class_="chart",
        aria_label=f"{title}: {words}",
    )  # fmt: skip
    return _figure(title, note, picture, _legend(["before", "after"], _dot_key), None)


def _figure(
    title: str, note: str, picture: Html, legend: Html | None, numbers: Html | None
) -> Html:
    caption = el("figcaption", title, el("small", note) if note else None)
    return el("figure", caption, legend, picture, fold("Numbers", numbers) if numbers else None)


def _numbers(title: str, steps: Sequence[int], series: Sequence[Series]) -> Html:
    rows: list[list[Child]] = [
        [step, *(shown(s.values[k]) for s in series)] for k, step in enumerate(steps)
    ]
    return table(["step", *(s.name for s in series)], rows, f"{title}, by step")


def _svg(description: str, *children: Html | Sequence[Html]) -> Html:
    return el(
        "svg", *children, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", role="img", class_="chart",
        aria_label=description,
    )  # fmt: skip


def _step_axis(steps: Sequence[int], margin: float = 0.0) -> Axis:
    return Axis(min(steps), max(steps), _LEFT + margin + 6, _RIGHT - margin)


def _axes(x: Axis, y: Axis, steps: Sequence[int]) -> Html:
    rows = [
        join(_rule(y(t), "grid"), el("text", shown(t), x=_LEFT - 6, y=y(t) + 4, text_anchor="end"))
        for t in y.ticks()
    ]
    columns = [
        el("text", shown(t), x=x(t), y=_BOTTOM + 15, text_anchor="middle")
        for t in round_ticks(min(steps), max(steps), whole=True)
    ]
    return join(rows, columns, el("text", "step", x=_LEFT - 6, y=_BOTTOM + 15, text_anchor="end"))


def _rule(y: float, class_: str) -> Html:
    return el("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_=class_)


def _line(series: Series, color: int, steps: Sequence[int], x: Axis, y: Axis) -> Html:
    drawn: list[Html] = []
    for run in _runs(series, steps):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
        if len(run) > 1:
            drawn.append(
                el("polyline", points=points, class_=f"curve s{color}",
                   stroke_dasharray=_DASHES[color])
            )  # fmt: skip
        if len(run) == 1 or len(steps) <= _MARKED:
            drawn += [_point(series.name, step, value, color, x, y) for step, value in run]
    return join(drawn)


def _point(name: str, step: int, value: float, color: int, x: Axis, y: Axis) -> Html:
    tip = el("title", f"{name}, step {step}: {shown(value)}")
    return el("circle", tip, cx=x(step), cy=y(value), r=2.6, class_=f"f{color}")


def _runs(series: Series, steps: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in zip(steps, series.values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _bins(steps: Sequence[int], parts: Sequence[Series]) -> tuple[list[int], list[list[float]]]:
    """At most _MOST_COLUMNS columns: (step of each, height of each part)."""
    size = -(-len(steps) // _MOST_COLUMNS)
    at = range(0, len(steps), size)
    heights = [[_mean([v or 0.0 for v in part.values[k : k + size]]) for part in parts] for k in at]
    return [steps[k] for k in at], heights


def _column(center: float, width: float, heights: Sequence[float], y: Axis) -> Html:
    drawn, base = [], 0.0
    for color, height in enumerate(heights):
        top = y(base + height)
        drawn.append(
            el("rect", x=center - width / 2, y=top, width=width, height=y(base) - top,
               class_=f"f{color % SERIES}")
        )  # fmt: skip
        base += height
    return join(drawn)


def _whisker(found: tuple[float, float, float] | None, y: float, x: Axis, kind: str) -> Html:
    if found is None:
        return el("text", f"{kind}: not measured", x=x(0.0) + 6, y=y + 4)
    share, low, high = found
    early = " early" if kind == "before" else ""
    return join(
        el("line", x1=x(low), x2=x(high), y1=y, y2=y, class_=f"range{early}"),
        el("circle", el("title", f"{kind}: {_words(found)}"), cx=x(share), cy=y, r=4.5,
           class_=kind),
    )  # fmt: skip


def _legend(names: Sequence[str], key: Callable[[int], Html]) -> Html:
    return el(
        "ul",
        (
            el("li", el("svg", key(i), viewBox="0 0 28 12", aria_hidden="true"), name)
            for i, name in enumerate(names)
        ),
        class_="legend",
    )


def _line_key(i: int) -> Html:
    return el(
        "line", x1=0, x2=28, y1=6, y2=6, class_=f"curve s{i % SERIES}",
        stroke_dasharray=_DASHES[i % SERIES],
    )  # fmt: skip


def _block_key(i: int) -> Html:
    return el("rect", x=8, y=0, width=16, height=12, class_=f"f{i % SERIES}")


def _dot_key(i: int) -> Html:
    early = " early" if i == 0 else ""
    return join(
        el("line", x1=0, x2=28, y1=6, y2=6, class_=f"range{early}"),
        el("circle", cx=14, cy=6, r=4.5, class_="before" if i == 0 else "after"),
    )


def _describe(title: str, steps: Sequence[int], series: Sequence[Series]) -> str:
    """What the picture shows, in words."""
    parts = []
    for s in series:
        found = [v for v in s.values if v is not None]
        if found:
            parts.append(
                f"{s.name} from {shown(found[0])} to {shown(found[-1])}, "
                f"lowest {shown(min(found))}, highest {shown(max(found))}"
            )
    return f"{title}, steps {min(steps)} to {max(steps)}: {'; '.join(parts) or 'no values'}"


def _words(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found[0]:.3f} (95 % interval {found[1]:.2f} to {found[2]:.2f})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""From values to pixels: axes with round ticks, linear or logarithmic, and numbers for people.

Pure functions. Invariant: every tick lies within its axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 1e-12  # what a logarithmic axis shows a zero as
_SMALLEST_SPAN = 1e-290  # of an axis: a quarter of it still has a logarithm


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps [low, high] to [start, stop] pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        if high == low:
            return (self.start + self.stop) / 2
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            return round_ticks(self.low, self.high)
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        stride = max(1, math.ceil((last - first) / 4))
        return [10.0**e for e in range(first, last + 1, stride)]


def value_axis(values: Sequence[float], start: float, stop: float, log: bool = False) -> Axis:
    """From zero (or the lowest value below it) to a round number above the highest."""
    if log:
        seen = [max(v, _SMALLEST) for v in values] or [1.0]
        first = math.floor(math.log10(min(seen)))
        last = max(math.ceil(math.log10(max(seen))), first + 1)
        return Axis(10.0**first, 10.0**last, start, stop, log=True)
    low, high = min([0.0, *values]), max([0.0, *values])
    if high - low < _SMALLEST_SPAN:
        high = low + 1.0
    stride = _stride(low, high)
    return Axis(math.floor(low / stride) * stride, math.ceil(high / stride) * stride, start, stop)


def round_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Three to six multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    stride = _stride(low, high)
    if whole:
        stride = max(1.0, math.ceil(stride))
    first, last = math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9)
    return [i * stride for i in range(first, last + 1)]


def shown(value: float | None) -> str:
    """A number for people; "–" where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _stride(low: float, high: float) -> float:
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    return next((m * unit for m in (1.0, 2.0, 5.0) if m * unit >= raw * (1 - 1e-9)), 10 * unit)

"""Line charts as inline SVG, without a library.

A chart holds one or more series of (step, value); its axes are in the data's own units, marked at round numbers. Each
point carries a <title>, which browsers show on hovering. Colours are classes, so that the page's style sheet decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 26
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Points


def line_chart(title: str, unit: str, series: list[Series]) -> str:
    """A <figure> with the chart, or nothing if no series has a point."""
    series = [line for line in series if line.points]
    if not series:
        return ""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 6, whole=True), ticks(min(ys), max(ys), 5)
    frame = _Frame(min(xs), max(xs), min(y_ticks[0], *ys), max(y_ticks[-1], *ys))
    parts = [_axes(frame, x_ticks, y_ticks)]
    parts += [_line(frame, line, index, unit) for index, line in enumerate(series)]
    legend = ""
    if len(series) > 1:
        names = "".join(
            f'<span class="s{i}">{escape(line.name)}</span>' for i, line in enumerate(series)
        )
        legend = f'<div class="legend">{names}</div>'
    caption = f"{escape(title)} <small>{escape(unit)}</small>" if unit else escape(title)
    return (
        f"<figure><figcaption>{caption}</figcaption>{legend}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} per step">'
        f"{''.join(parts)}</svg></figure>"
    )


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """At most about `count` round numbers that cover [low, high]."""
    if high <= low:  # one value: show it amid a range
        margin = 1 if whole or low == 0 else abs(low) / 2
        low, high = (low if whole or low == 0 else low - margin), high + margin
    raw = (high - low) / max(1, count - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        step = max(1, round(step))
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _axes(frame: _Frame, x_ticks: list[float], y_ticks: list[float]) -> str:
    parts = []
    for value in y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{short(value)}</text>')
    for value in x_ticks:
        if frame.x_low <= value <= frame.x_high:
            x = frame.x(value)
            parts.append(
                f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{short(value)}</text>'
            )
    return "".join(parts)


def _line(frame: _Frame, line: Series, index: int, unit: str) -> str:
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in line.points)
    dots = "".join(
        f'<circle class="s{index}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="{3 if len(line.points) < 40 else 2}">'
        f"<title>{escape(line.name)}, step {short(x)}: {short(y)} {escape(unit)}</title></circle>"
        for x, y in line.points
    )
    return f'<polyline class="s{index}" points="{path}"/>{dots}'


def short(value: float) -> str:
    """A number in few characters: 0.25, 1,400, 1.4e+09."""
    if value == round(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2g}"

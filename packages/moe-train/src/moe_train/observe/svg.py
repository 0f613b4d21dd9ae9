"""Charts as inline SVG. Colours are CSS classes of `report.css`, so that a chart follows the reader's colour scheme."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _TOP, _BOTTOM = 62, 12, 38
_LARGEST_NUMBER_OF_POINTS = 300

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A line through points with ascending x; `css` is its colour class. With `marked` every point is drawn."""

    name: str
    css: str
    points: Sequence[Point]
    marked: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line for reference."""

    name: str
    value: float


@dataclass(frozen=True)
class SecondScale:
    """The same heights in another unit, on the right: `value * factor`."""

    label: str
    factor: float


def line_chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    second: SecondScale | None = None,
    from_zero: bool = False,
    width: int = 560,
    height: int = 230,
) -> str:
    """Curves over a common x axis. More points than can be told apart are drawn as means with their range behind."""
    drawn = [_thin(curve.points) for curve in curves]
    right = 62 if second else 16
    heights = [y for points, band in drawn for y in (*(y for _, y in points), *(y for _, *ys in band for y in ys))]
    heights += [level.value for level in levels] + ([0.0] if from_zero else [])
    xs = [x for points, _ in drawn for x, _ in points]
    x_ticks, y_ticks = _ticks(min(xs), max(xs), 8), _ticks(min(heights), max(heights), 5)
    low, high = _range(heights, y_ticks)
    x = _scale(min(xs), max(xs), _LEFT, width - right)
    y = _scale(low, high, height - _BOTTOM, _TOP)

    parts = [
        _text(_LEFT - 8, y(tick) + 4, _number(tick), "tick end") + _line(_LEFT, y(tick), width - right, y(tick), "grid")
        for tick in y_ticks
        if low <= tick <= high
    ]
    parts += [_text(x(tick), height - _BOTTOM + 17, _number(tick), "tick middle") for tick in x_ticks]
    parts.append(_text((_LEFT + width - right) / 2, height - 5, x_label, "label middle"))
    parts.append(_turned(13, (height - _BOTTOM + _TOP) / 2, y_label))
    if second:
        parts += [
            _text(width - right + 8, y(tick / second.factor) + 4, _number(tick), "tick")
            for tick in _ticks(low * second.factor, high * second.factor, 5)
            if low <= tick / second.factor <= high
        ]
        parts.append(_turned(width - 6, (height - _BOTTOM + _TOP) / 2, second.label))
    for level in levels:
        parts.append(_line(_LEFT, y(level.value), width - right, y(level.value), "level"))
        parts.append(_text(width - right - 6, y(level.value) - 5, f"{level.name} {level.value:.3f}", "level-label end"))
    for curve, (points, band) in zip(curves, drawn, strict=True):
        if band:
            outline = [(x(a), y(top)) for a, _, top in band] + [(x(a), y(bottom)) for a, bottom, _ in reversed(band)]
            parts.append(f'<polygon class="band {curve.css}" points="{_points(outline)}"/>')
        if len(points) > 1:
            parts.append(f'<polyline class="curve {curve.css}" points="{_points([(x(a), y(b)) for a, b in points])}"/>')
        if curve.marked or len(points) == 1:
            parts += [_dot(x(a), y(b), curve.css, f"{curve.name}: {b:.4g} ({x_label} {_number(a)})") for a, b in points]
    return _svg(width, height, ", ".join(curve.name for curve in curves), parts)


def heatmap(
    values: Sequence[Sequence[float]],
    *,
    row_label: str,
    column_label: str,
    column_names: Sequence[str],
    paint: Callable[[float], tuple[str, float]],
    describe: Callable[[int, int], str],
    cell_text: str = "",
    width: int = 1140,
) -> str:
    """A grid of cells, one row per sequence of values.

    `paint` gives the colour class and the opacity of a value, `describe` the tool tip of (row, column), and
    `cell_text` the format of a value, written where the cell has room.
    """
    rows, columns = len(values), len(values[0])
    cell_width = (width - _LEFT - 16) / columns
    cell_height = 24 if rows <= 16 else 12 if rows <= 48 else 6
    height = _TOP + rows * cell_height + _BOTTOM
    gap = 1 if min(cell_width, cell_height) > 5 else 0
    parts = []
    for row, line in enumerate(values):
        top = _TOP + row * cell_height
        for column, value in enumerate(line):
            css, opacity = paint(value)
            left = _LEFT + column * cell_width
            box = f'x="{left:.2f}" y="{top}" width="{cell_width - gap:.2f}" height="{cell_height - gap}"'
            title = f"<title>{escape(describe(row, column))}</title>"
            parts.append(f'<rect class="cell {css}" fill-opacity="{opacity:.2f}" {box}>{title}</rect>')
            if cell_text and cell_width >= 34 and cell_height >= 16:
                parts.append(_text(left + cell_width / 2, top + 16, format(value, cell_text), "cell-text middle"))
    for row in range(0, rows, math.ceil(rows * 14 / (rows * cell_height))):
        parts.append(_text(_LEFT - 8, _TOP + row * cell_height + cell_height / 2 + 4, str(row), "tick end"))
    for column in range(0, columns, max(1, math.ceil(columns / 16))):
        place = _LEFT + (column + 0.5) * cell_width
        parts.append(_text(place, height - _BOTTOM + 17, column_names[column], "tick middle"))
    parts.append(_text(_LEFT + (width - _LEFT - 16) / 2, height - 5, column_label, "label middle"))
    parts.append(_turned(13, (height - _BOTTOM + _TOP) / 2, row_label))
    return _svg(width, height, f"{row_label} by {column_label}", parts)


def _thin(points: Sequence[Point]) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """At most so many points as means of neighbours, and the (x, lowest, highest) of what each one stands for."""
    size = math.ceil(len(points) / _LARGEST_NUMBER_OF_POINTS)
    if size <= 1:
        return list(points), []
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [
        (math.fsum(a for a, _ in group) / len(group), math.fsum(b for _, b in group) / len(group)) for group in groups
    ]
    band = [
        (mean[0], min(b for _, b in group), max(b for _, b in group)) for mean, group in zip(means, groups, strict=True)
    ]
    return means, band


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high, about so many."""
    span = (high - low) or abs(high) or 1.0
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(heights: Sequence[float], ticks: Sequence[float]) -> tuple[float, float]:
    low, high = min([*heights, *ticks]), max([*heights, *ticks])
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
    return (low if low == 0 else low - margin), high + margin


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def _number(value: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit * 0.9999:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{a:.2f},{b:.2f}" for a, b in points)


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _dot(x: float, y: float, css: str, title: str) -> str:
    return f'<circle class="dot {css}" cx="{x:.2f}" cy="{y:.2f}" r="4"><title>{escape(title)}</title></circle>'


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" transform="rotate(-90 {x:.2f} {y:.2f})"'
    return f'<text class="label middle" {place}>{escape(text)}</text>'


def _svg(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f'{opening} xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'

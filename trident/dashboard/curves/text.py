"""Draws curves as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trident.dashboard.curves.reading import AXIS_TITLES, STEPS, Curve, position_text

# Braille patterns have 2 x 4 dots; bit of the dot in (row, column).
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


def text_plot(
    curves: Sequence[Curve], *, width: int = 72, height: int = 14, unicode: bool = True, axis: str = STEPS
) -> list[str]:
    """Draws each curve as a panel of characters; all panels share both axes.

    Args:
        curves: each has at least one point.
        width: characters of the drawing area.
        height: lines of the drawing area.
        unicode: use braille dots (2 x 4 per character) instead of asterisks.
        axis: the x axis, one of `AXES`.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    columns, rows = (2, 4) if unicode else (1, 1)
    lines: list[str] = []
    for curve in curves:
        cells = [[0] * width for _ in range(height)]
        for column, row in _dots(curve, (left, right, bottom, top), width * columns, height * rows):
            cells[row // rows][column // columns] |= _DOTS[row % rows][column % columns]
        lines.append(curve.summary(axis))
        for number, cell_row in enumerate(cells):
            label = f"{top:.4g}" if number == 0 else f"{bottom:.4g}" if number == height - 1 else ""
            drawn = "".join(chr(_BRAILLE + bits) if unicode else " *"[bool(bits)] for bits in cell_row)
            lines.append(f"{label:>10} |{drawn}".rstrip())
        lines.append(f"{'':>10} +{'-' * width}")
        first, last = f"{AXIS_TITLES[axis].partition(' (')[0]} {position_text(left, axis)}", position_text(right, axis)
        lines.append(f"{'':>10}  {first:<{width // 2}}{last:>{width - width // 2}}")
    return lines


def _dots(curve: Curve, box: tuple[float, float, float, float], columns: int, rows: int) -> list[tuple[int, int]]:
    """The dots (column, row from the top) on the lines between a curve's points."""
    left, right, bottom, top = box

    def position(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - bottom) / (top - bottom) if top > bottom else 0.5
        return across * (columns - 1), (1.0 - up) * (rows - 1)

    dots = []
    start = position(*curve.points[0])
    for point in curve.points:
        end = position(*point)
        steps = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for step in range(steps + 1):
            share = step / steps
            column = start[0] + share * (end[0] - start[0])
            row = start[1] + share * (end[1] - start[1])
            dots.append((round(column), round(row)))
        start = end
    return dots

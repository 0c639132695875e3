"""Plots of training curves as images and as text; the only file that imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.formats.atomic_files import check_writable
from megatron.errors import ConfigError, DataError, StorageError
from megatron.observe.known_runs import check_run
from megatron.observe.metrics_file import read_records, read_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Braille patterns have 2 x 4 dots; bit of the dot in (row, column).
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BRAILLE = 0x2800


@dataclass(frozen=True)
class Curve:
    """Finite values over iterations."""

    name: str
    points: tuple[tuple[int, float], ...]
    is_evaluation: bool = False

    @property
    def summary(self) -> str:
        """The first and last value as text."""
        (first, start), (last, end) = self.points[0], self.points[-1]
        return f"{self.name}: {start:.4g} -> {end:.4g} (iterations {first} to {last})"


def read_curves(path: str | Path, metric: str) -> list[Curve]:
    """The training curve of a run and, for the loss, one curve per evaluated data group.

    Args:
        path: a run directory or its metrics file.
        metric: a field of `Metrics`.

    Raises:
        DataError: the file is missing or cannot be read, or holds no finite value of this metric.
    """
    check_run(path)
    name = Path(path).parent.name if Path(path).is_file() else Path(path).name
    curves = [_curve(name, [(step, record.get(metric)) for step, record in read_steps(path).items()])]
    if not curves[0].points:
        raise DataError(f"{path} holds no step with a finite {metric}. Train a step first, or choose another --metric.")
    if metric == "lm_loss":
        groups: dict[str, dict[int, object]] = {}
        for record in read_records(path):
            if record["kind"] == "evaluation":
                groups.setdefault(str(record["group"]), {})[int(record["iteration"])] = record["lm_loss"]
        for group, values in groups.items():
            curves.append(_curve(f"{name} {group}", sorted(values.items()), is_evaluation=True))
    return [curve for curve in curves if curve.points]


def text_plot(curves: Sequence[Curve], *, width: int = 72, height: int = 14, unicode: bool = True) -> list[str]:
    """Draws each curve as a panel of characters; all panels share both axes.

    Args:
        curves: the curves to draw; each has at least one point.
        width: characters of the drawing area.
        height: lines of the drawing area.
        unicode: use braille dots (2 x 4 per character); otherwise asterisks.
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
        lines.append(curve.summary)
        for number, cell_row in enumerate(cells):
            label = f"{top:.4g}" if number == 0 else f"{bottom:.4g}" if number == height - 1 else ""
            drawn = "".join(chr(_BRAILLE + bits) if unicode else " *"[bool(bits)] for bits in cell_row)
            lines.append(f"{label:>10} |{drawn}".rstrip())
        lines.append(f"{'':>10} +{'-' * width}")
        lines.append(f"{'':>10}  {f'iteration {left}':<{width // 2}}{right:>{width - width // 2}}")
    return lines


def check_plot_path(path: str | Path) -> None:
    """Checks that a plot can be saved to `path`, before anything is read or shown.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the file extension.
        StorageError: the path cannot be written.
    """
    _new_figure(path)
    check_writable(Path(path))


def write_plot(curves: Sequence[Curve], path: str | Path, metric: str) -> None:
    """Draws all curves in one plot; the file extension determines the format.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the file extension.
        StorageError: the file cannot be written.
    """
    figure = _new_figure(path)
    axes = figure.subplots()
    for curve in curves:
        x, y = zip(*curve.points, strict=True)
        marker = "o" if curve.is_evaluation else "." if len(x) == 1 else ""
        axes.plot(x, y, label=curve.name, linewidth=1.2, marker=marker, linestyle="--" if curve.is_evaluation else "-")
    axes.set_xlabel("iteration")
    axes.set_ylabel(metric.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as failure:
        raise StorageError(f"--output {path} cannot be written: {failure.strerror}. Choose another path.") from failure


def _new_figure(path: str | Path) -> Figure:
    """An empty figure that can be saved under this name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ConfigError(
            f"--output {path} needs the package matplotlib, which cannot be imported ({failure}). Install it with: pip "
            "install matplotlib"
        ) from failure
    figure = Figure(figsize=(9.0, 5.0), dpi=120, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise ConfigError(
            f"--output {path} has no extension of an image format. Use one of: .{', .'.join(sorted(known))}."
        )
    return figure


def _curve(name: str, points: Sequence[tuple[int, object]], *, is_evaluation: bool = False) -> Curve:
    finite = tuple((x, float(y)) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y))
    return Curve(name, finite, is_evaluation)


def _dots(curve: Curve, box: tuple[float, float, float, float], columns: int, rows: int) -> list[tuple[int, int]]:
    """The dots (column, row from the top) on the lines between a curve's points."""
    left, right, bottom, top = box

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - bottom) / (top - bottom) if top > bottom else 0.5
        return across * (columns - 1), (1.0 - up) * (rows - 1)

    found = []
    former = place(*curve.points[0])
    for point in curve.points:
        now = place(*point)
        steps = max(1, math.ceil(max(abs(now[0] - former[0]), abs(now[1] - former[1]))))
        for step in range(steps + 1):
            share = step / steps
            column = former[0] + share * (now[0] - former[0])
            row = former[1] + share * (now[1] - former[1])
            found.append((round(column), round(row)))
        former = now
    return found

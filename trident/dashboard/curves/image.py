"""Curves as an image; the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, StorageError
from megatron.files.replacing import check_writable
from trident.dashboard.curves.reading import AXIS_TITLES, STEPS, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Markers and line styles of evaluation groups: validation and test first.
_GROUP_STYLES = (("o", "--"), ("D", ":"), ("s", "-."), ("^", "--"))
_WIDTH, _PANEL_HEIGHT, _LONE_HEIGHT = 9.0, 2.6, 5.0  # inches


def check_plot_path(path: str | Path) -> None:
    """Checks that a plot can be saved to `path`, before anything is read or shown.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the file extension.
        StorageError: the path cannot be written.
    """
    _new_figure(path, 1)
    check_writable(Path(path))


def write_plot(figure: Figure, path: str | Path) -> None:
    """Writes a drawing; the file extension determines the format.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        figure.savefig(path)
    except OSError as failure:
        raise StorageError(f"--output {path} cannot be written: {failure.strerror}. Choose another path.") from failure


def draw_plot(
    panels: Mapping[str, Sequence[Curve]],
    path: str | Path,
    *,
    axis: str = STEPS,
    smoothing_ratio: float = 0.0,
    title: str = "",
    log_scale: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Draws one panel per metric, with all runs in each.

    Args:
        panels: the curves by metric.
        path: destination of the image.
        axis: the x axis, one of `AXES`.
        smoothing_ratio: see `Curve.smoothed`; the unsmoothed curve is drawn faintly behind.
        log_scale: use a logarithmic y axis.
        marks: positions on the x axis, and their labels.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the file extension.
    """
    figure = _new_figure(path, len(panels))
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (metric, curves) in zip(drawn, panels.items(), strict=True):
        _draw(axes, curves, smoothing_ratio)
        axes.set_ylabel(metric.replace("_", " "))
        axes.margins(x=0.01)
        if log_scale and all(y > 0.0 for curve in curves for _, y in curve.points):
            _set_log_scale(axes)
        axes.grid(alpha=0.3, which="both")
        _draw_marks(axes, marks, axes is drawn[0])
        if axes is drawn[0] or metric == "lm_loss":
            axes.legend()
    drawn[-1].set_xlabel(AXIS_TITLES[axis])
    _shorten_numbers(drawn[-1], panels, axis)
    figure.suptitle(title)
    return figure


def _draw(axes: Axes, curves: Sequence[Curve], smoothing_ratio: float) -> None:
    """Draws one colour per run, curves hidden by a later one as wide bands, and evaluations with markers by group."""
    runs = list(dict.fromkeys(curve.run for curve in curves))
    groups = list(dict.fromkeys(curve.group for curve in curves if curve.is_evaluation))
    for index, curve in enumerate(curves):
        colour = f"C{runs.index(curve.run) % 10}"
        x, y = zip(*curve.points, strict=True)
        if curve.is_evaluation:
            marker, style = _GROUP_STYLES[groups.index(curve.group) % len(_GROUP_STYLES)]
            (line,) = axes.plot(x, y, label=curve.name, color=colour, linewidth=1.2, linestyle=style, zorder=4)
            line.set(marker=marker, markersize=7, markeredgecolor="white")
            continue
        smoothed = curve.smoothed(smoothing_ratio) if smoothing_ratio else curve
        if smoothed is not curve:
            axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.25)
            x, y = zip(*smoothed.points, strict=True)
        is_covered = any(other.covers(curve) for other in curves[index + 1 :] if not other.is_evaluation)
        (line,) = axes.plot(x, y, label=curve.name, color=colour, linewidth=1.4, marker="." if len(x) == 1 else "")
        if is_covered:
            line.set(linewidth=6.0, alpha=0.4, solid_capstyle="butt", zorder=1.5)


def _draw_marks(axes: Axes, marks: Sequence[tuple[float, str]], has_texts: bool) -> None:
    """Draws vertical lines, with their labels above the first panel; the outer labels are aligned outwards."""
    alignments = ["right", *["center"] * (len(marks) - 2), "left"] if len(marks) > 1 else ["center"]
    for (x, text), alignment in zip(sorted(marks), alignments, strict=False):
        axes.axvline(x, color="0.3", linewidth=1.0, linestyle=":", zorder=1)
        if has_texts:
            axes.text(x, 1.01, text, transform=axes.get_xaxis_transform(), ha=alignment, va="bottom", color="0.25")


def _set_log_scale(axes: Axes) -> None:
    """Sets a logarithmic y axis with plain numbers as labels."""
    from matplotlib.ticker import LogFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(10, 10)))


def _shorten_numbers(axes: Axes, panels: Mapping[str, Sequence[Curve]], axis: str) -> None:
    """Writes large numbers of an axis with a unit: 10 M, 1.5 E."""
    from matplotlib.ticker import EngFormatter

    if max(x for curves in panels.values() for curve in curves for x, _ in curve.points) >= 1e5:
        axes.xaxis.set_major_formatter(EngFormatter())


def _new_figure(path: str | Path, panels: int) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ConfigError(
            f"--output {path} requires matplotlib, which cannot be imported ({failure}). Install it with: pip install "
            "matplotlib"
        ) from failure
    height = _LONE_HEIGHT if panels == 1 else _PANEL_HEIGHT * panels
    figure = Figure(figsize=(_WIDTH, height), dpi=120, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--output {path} has no known image extension. Use one of: .{', .'.join(sorted(known))}.")
    return figure

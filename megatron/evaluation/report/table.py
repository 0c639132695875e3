"""The result of a task as lines of text: the network below the baselines, and a few of its mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron.errors import printable
from megatron.evaluation.tasks.task import TaskResult

NETWORK = "model"
_ROUNDING = 1e-12  # an error below this part of its figure comes from adding up equal values


def result_lines(result: TaskResult) -> Iterator[str]:
    """A table with a row for each baseline and the network and a column for each figure, then the mistakes."""
    about = "; ".join([f"{result.count} {'item' if result.count == 1 else 'items'}", *result.notes])
    yield f"{result.name} ({result.kind}; {about})"
    metrics = list(result.figures)
    rows = [["", *metrics]]
    for name, figures in result.baselines.items():
        rows.append([name, *(_cell(metric, figures, result.baseline_errors.get(name, {})) for metric in metrics)])
    rows.append([NETWORK, *(_cell(metric, result.figures, result.errors) for metric in metrics)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        yield ("  " + "   ".join(cells)).rstrip()
    for mistake in result.wrong:
        yield f"  wrong at {printable(mistake.place, quoted=False)}"
        yield f"    after {printable(mistake.context[-80:])}"
        yield f"    it is {printable(mistake.expected)}, predicted was {printable(mistake.predicted)}"


def _cell(metric: str, figures: Mapping[str, float], errors: Mapping[str, float]) -> str:
    if metric not in figures:
        return ""
    value = figures[metric]
    error = errors.get(metric)
    if error is not None and error <= _ROUNDING * abs(value):
        error = 0.0
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"

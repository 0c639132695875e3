"""Results of tasks: a table for the terminal, and a JSON file that is complete after each task."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megatron
from megatron.errors import DataError, printable
from megatron.files.plain import read_plain_json
from megatron.files.replacing import write_atomically
from trident.evaluate.tasks.task import TaskResult

FORMAT = "megatron-evaluation"
FORMAT_VERSION = 1
MOST_BYTES = 1 << 30
_KEYS = {"source": "place"}

NETWORK = "model"
_ROUNDING = 1e-12  # relative error below which a standard error is rounding of equal values


@dataclass(frozen=True)
class EvaluatedTask:
    """The outcome of a task: its result, or its error."""

    title: str
    result: TaskResult | None = None
    failure: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The outcome's entry in the file, where the source of a mistake has the key "place"."""
        if self.result is None:
            return {"name": self.title, "failure": self.failure}
        entry = asdict(self.result, dict_factory=lambda pairs: {_KEYS.get(key, key): value for key, value in pairs})
        return {**entry, "seconds": round(self.seconds, 3)}


def write_results(path: Path, about: Mapping[str, Any], outcomes: Sequence[EvaluatedTask]) -> None:
    """Writes the file, replacing an older one.

    Args:
        about: facts on the evaluation: checkpoint, tokenizer, layout, seed, limit.

    Raises:
        StorageError: the file cannot be written; an older file is unchanged.
    """
    tree = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": megatron.__version__,
        **about,
        "tasks": [outcome.to_json() for outcome in outcomes],
    }
    text = json.dumps(_without_infinities(tree), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, text.encode(errors="backslashreplace"))


def read_results(path: Path) -> dict[str, Any]:
    """Reads a file of `write_results`.

    Raises:
        DataError: the file cannot be read, or is not a results file.
    """
    try:
        tree = read_plain_json(path, MOST_BYTES, MOST_BYTES // 8)
    except (OSError, ValueError) as failure:
        raise DataError(f"{path} cannot be read as results of an evaluation: {failure}.") from failure
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} holds no results of tools/evaluate.py of this version.")
    return tree


def _without_infinities(value: Any) -> Any:
    """Converts infinities and NaN to texts, since JSON lacks them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return value


def result_lines(result: TaskResult) -> Iterator[str]:
    """A table with a row for each baseline and the network and a column for each metric, then the mistakes."""
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
        yield f"  wrong at {printable(mistake.source, quoted=False)}"
        yield f"    after {printable(mistake.context[-80:])}"
        yield f"    expected {printable(mistake.expected)}, predicted {printable(mistake.predicted)}"


def _cell(metric: str, figures: Mapping[str, float], errors: Mapping[str, float]) -> str:
    if metric not in figures:
        return ""
    value = figures[metric]
    error = errors.get(metric)
    if error is not None and error <= _ROUNDING * abs(value):
        error = 0.0
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"

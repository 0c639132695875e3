"""Summaries and comparisons of checkpoints as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.checkpoint.analysis.comparison import Comparison, flat_config
from megatron.checkpoint.analysis.slices import OpenCheckpoint
from megatron.checkpoint.analysis.summary import CheckpointSummary, TensorSummary, ValueFigures
from megatron.parallel.pieces import Kind

_LONGEST_VALUE = 60
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def summary_lines(summary: CheckpointSummary) -> Iterator[str]:
    """A summary: the run, the tensors as a table, and the configuration as far as it was given."""
    checkpoint = summary.checkpoint
    yield from _heading(checkpoint)
    files = checkpoint.manifest.files
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in summary.bytes_by_kind.items())
    yield f"  files      {len(files)}, {size_text(sum(file.size_bytes for file in files))}: {kinds}"
    yield ""
    rows = [row for tensor in summary.tensors for row in _tensor_rows(tensor)]
    yield from table(("tensor", "shape", "kind", "type", "norm", "mean", "smallest", "largest"), rows, texts=4)
    norm = "" if summary.norm is None else f", norm of the weights {summary.norm:.6g}"
    yield f"{len(summary.tensors)} tensors, {summary.elements:,} elements{norm}"
    yield ""
    yield from _config_lines(checkpoint)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """A comparison: what only one has, tensors that differ as a table, fields that differ, and a verdict."""
    yield from _heading(comparison.first)
    yield from _heading(comparison.second)
    for which, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        for name in names:
            yield f"only in the {which}: {name}"
    for change in comparison.other_shape:
        yield f"of another shape: {change.field} {_shape(change.first)} and {_shape(change.second)}"
    different = [entry for entry in comparison.differences if entry.different]
    if different:
        rows = [
            (
                entry.name,
                entry.kind,
                f"{entry.different} of {entry.elements}",
                f"{entry.largest_absolute:.3g}",
                f"{entry.largest_relative:.3g}",
                f"{entry.relative_norm:.3g}",
            )
            for entry in different
        ]
        heading = ("tensor", "kind", "elements", "largest absolute", "largest relative", "norm ratio")
        yield from table(heading, rows, texts=2)
    for change in (*comparison.config, *comparison.progress):
        yield f"{change.field}: {_value(change.first)} and {_value(change.second)}"
    if comparison.holds_same_tensors:
        yield f"EQUAL: all {len(comparison.differences)} tensors, bit for bit"
        return
    apart = [*comparison.only_first, *comparison.only_second, *(change.field for change in comparison.other_shape)]
    largest = max((entry.largest_absolute for entry in different), default=0.0)
    yield (
        f"DIFFERENT: {len(different)} of the {len(comparison.differences)} tensors that were compared (largest "
        f"absolute difference {largest:.3g}), and {len(apart)} that could not be compared"
    )


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> Iterator[str]:
    """Columns of equal width; the first `texts` are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for place, row in enumerate((heading, *rows)):
        cells = [
            cell.ljust(width) if number < texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " | ".join(cells).rstrip()
        if place == 0:
            yield "-" * (sum(widths) + 3 * (len(widths) - 1))


def size_text(size_bytes: float) -> str:
    """A size with its unit, to four digits."""
    power = min(len(_UNITS) - 1, int(math.log10(size_bytes) // 3)) if size_bytes >= 1 else 0
    return f"{size_bytes / 1000**power:.4g} {_UNITS[power]}"


def _heading(checkpoint: OpenCheckpoint) -> Iterator[str]:
    record = checkpoint.record
    progress = record.progress
    yield f"checkpoint {checkpoint.folder}"
    yield (
        f"  progress   step {progress.step}, {progress.consumed_samples} samples and {progress.consumed_tokens} tokens "
        f"consumed, {progress.skipped_steps} steps skipped, {record.optimizer_updates} updates of the optimizer"
    )
    yield (
        f"  tokenizer  {record.tokenizer.name}, {record.tokenizer.vocab_size} tokens, "
        f"fingerprint {str(record.tokenizer.fingerprint)[:12]}; written by version {record.program_version}"
    )


def _tensor_rows(summary: TensorSummary) -> Iterator[tuple[str, ...]]:
    """A row for each kind whose values were read, and one for the kinds that were not."""
    tensor = summary.tensor
    for kind, figures in summary.figures.items():
        yield (tensor.name, _shape(tensor.shape), kind, tensor.kinds[kind], *_figures(figures))
    left: list[Kind] = [kind for kind in tensor.kinds if kind not in summary.figures]
    if left and not summary.figures:
        types = dict.fromkeys(tensor.kinds[kind] for kind in left)
        yield (tensor.name, _shape(tensor.shape), " ".join(left), " ".join(types), "", "", "", "")


def _figures(figures: ValueFigures) -> tuple[str, ...]:
    if not figures.finite:
        return ("", "", "", f"{figures.not_finite} not finite")
    mean = figures.total / figures.finite
    largest = f"{figures.largest:.4g}"
    if figures.not_finite:
        largest += f", {figures.not_finite} not finite"
    return (f"{figures.norm:.6g}", f"{mean:.3g}", f"{figures.smallest:.4g}", largest)


def _config_lines(checkpoint: OpenCheckpoint) -> Iterator[str]:
    """The stored fields that were not left at their defaults."""
    config = checkpoint.record.config
    given = {name for name, source in dict(config.get("provenance", {})).items() if source != "default"}
    for name, value in flat_config(config).items():
        if not given or name in given:
            yield f"{name} = {_value(value)}"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."

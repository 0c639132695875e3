"""What is in a checkpoint: its tensors with figures of their values, its record and its sizes; and as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from megatron.checkpoint.catalogue import ITEM_BYTES, CheckpointTensor
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.errors import CheckpointError
from megatron.parallel.pieces import Kind
from trident.checkpoints.slices import batches

_LONGEST_VALUE = 60
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


@dataclass
class ValueFigures:
    """Figures of a tensor's values, collected slice by slice in float64; non-finite values are only counted."""

    finite: int = 0
    not_finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Adds more values."""
        count = values.numel()
        total = float(values.sum(dtype=torch.float64))
        if not math.isfinite(total):  # a sum of finite values of 32 bits is finite
            values = values[values.isfinite()]
            total = float(values.sum(dtype=torch.float64))
        self.not_finite += count - values.numel()
        if values.numel():
            smallest, largest = values.aminmax()
            self.finite += values.numel()
            self.total += total
            self.squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            self.smallest = min(self.smallest, float(smallest))
            self.largest = max(self.largest, float(largest))

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    def to_json(self) -> dict[str, Any]:
        """Norm, mean, smallest and largest value (null without a finite value) and the number of non-finite values."""
        known = self.finite > 0
        return {
            "norm": self.norm if known else None,
            "mean": self.total / self.finite if known else None,
            "smallest": self.smallest if known else None,
            "largest": self.largest if known else None,
            "not_finite": self.not_finite,
        }


@dataclass(frozen=True)
class TensorSummary:
    """One tensor, with the figures of the kinds whose values were read."""

    tensor: CheckpointTensor
    figures: Mapping[Kind, ValueFigures] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.tensor.name,
            "shape": list(self.tensor.shape),
            "elements": self.tensor.numel,
            "kinds": {
                kind: {"type": dtype, **(self.figures[kind].to_json() if kind in self.figures else {})}
                for kind, dtype in self.tensor.kinds.items()
            },
        }


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint as the tool shows it; `tensors` are those that were asked for, sorted by name."""

    checkpoint: OpenCheckpoint
    tensors: Sequence[TensorSummary]

    @property
    def elements(self) -> int:
        return sum(summary.tensor.numel for summary in self.tensors)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the tensors shown take, by kind."""
        sizes: dict[str, int] = {}
        for summary in self.tensors:
            for kind, dtype in summary.tensor.kinds.items():
                sizes[kind] = sizes.get(kind, 0) + summary.tensor.numel * ITEM_BYTES[dtype]
        return sizes

    @property
    def norm(self) -> float | None:
        """The norm of all weights shown; None if no values were read."""
        weights = [summary.figures.get(summary.tensor.weight_kind) for summary in self.tensors]
        squares = [figures.squares for figures in weights if figures]
        return math.sqrt(math.fsum(squares)) if squares else None

    def to_json(self) -> dict[str, Any]:
        """The whole summary, with the record as it is stored."""
        files = self.checkpoint.manifest.files
        return {
            "path": str(self.checkpoint.folder),
            "step": self.checkpoint.manifest.step,
            "elements": self.elements,
            "norm": self.norm,
            "bytes_by_kind": self.bytes_by_kind,
            "files": len(files),
            "size_bytes": sum(file.size_bytes for file in files),
            "tensors": [summary.to_json() for summary in self.tensors],
            "record": self.checkpoint.manifest.record,
        }


def chosen_tensors(checkpoint: OpenCheckpoint, patterns: Sequence[str] = ()) -> dict[str, CheckpointTensor]:
    """The tensors whose names match one of the shell patterns, all without patterns, in the order of the files.

    Raises:
        CheckpointError: a pattern matches no tensor.
    """
    tensors = checkpoint.tensors()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise CheckpointError(
                f"no tensor of {checkpoint.folder} matches {pattern}. It holds {', '.join(sorted(tensors)[:8])}, ..."
            )
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def summarize(
    checkpoint: OpenCheckpoint,
    patterns: Sequence[str] = (),
    *,
    with_values: bool = True,
    with_moments: bool = False,
) -> CheckpointSummary:
    """Describes a checkpoint.

    Args:
        patterns: shell patterns of tensor names; all tensors without one.
        with_values: read the weights, which also verifies their bytes, instead of the manifest only.
        with_moments: read the other stored kinds, too.

    Raises:
        CheckpointError: a pattern matches no tensor.
        DamagedError: the bytes are not those that were written.
    """
    chosen = chosen_tensors(checkpoint, patterns)
    figures: dict[str, dict[Kind, ValueFigures]] = {name: {} for name in chosen}
    read = (
        (tensor.name, kind, tensor.shape)
        for tensor in (chosen.values() if with_values else ())
        for kind in (tensor.kinds if with_moments else (tensor.weight_kind,))
    )
    for batch in batches(read):
        for key, values in zip(batch, checkpoint.read(batch), strict=True):
            figures[key.name].setdefault(key.kind, ValueFigures()).add(values)
    return CheckpointSummary(checkpoint, [TensorSummary(chosen[name], figures[name]) for name in sorted(chosen)])


def summary_lines(summary: CheckpointSummary) -> Iterator[str]:
    """A summary: the run, the tensors as a table, and the configuration as far as it was given."""
    checkpoint = summary.checkpoint
    yield from heading(checkpoint)
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


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a stored configuration by "section.field"; where they came from is left out."""
    return {
        f"{section}.{name}": value
        for section, entries in config.items()
        if section != "provenance" and isinstance(entries, Mapping)
        for name, value in entries.items()
    }


def heading(checkpoint: OpenCheckpoint) -> Iterator[str]:
    """What a checkpoint is, how far its run had come, and its tokenizer."""
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


def shape_text(shape: Sequence[int]) -> str:
    """A shape."""
    return "[" + ", ".join(map(str, shape)) + "]"


def value_text(value: Any) -> str:
    """A value, cut short."""
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _tensor_rows(summary: TensorSummary) -> Iterator[tuple[str, ...]]:
    """A row for each kind whose values were read, and one for the kinds that were not."""
    tensor = summary.tensor
    for kind, figures in summary.figures.items():
        yield (tensor.name, shape_text(tensor.shape), kind, tensor.kinds[kind], *_figures(figures))
    left: list[Kind] = [kind for kind in tensor.kinds if kind not in summary.figures]
    if left and not summary.figures:
        types = dict.fromkeys(tensor.kinds[kind] for kind in left)
        yield (tensor.name, shape_text(tensor.shape), " ".join(left), " ".join(types), "", "", "", "")


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
            yield f"{name} = {value_text(value)}"

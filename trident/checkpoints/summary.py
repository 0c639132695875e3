"""Summarizes a checkpoint: its tensors with statistics of their values, its record and its sizes."""

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
class ValueStats:
    """Statistics of a tensor's values, accumulated slice by slice in float64; non-finite values are only counted."""

    finite: int = 0
    not_finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Adds a slice of the tensor."""
        count = values.numel()
        total = float(values.sum(dtype=torch.float64))
        if not math.isfinite(total):  # the float64 sum of finite float32 values is finite
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
        """All statistics; null without a finite value."""
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
    """A tensor, with the statistics of the kinds that were read."""

    tensor: CheckpointTensor
    stats: Mapping[Kind, ValueStats] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.tensor.name,
            "shape": list(self.tensor.shape),
            "elements": self.tensor.numel,
            "kinds": {
                kind: {"type": dtype, **(self.stats[kind].to_json() if kind in self.stats else {})}
                for kind, dtype in self.tensor.kinds.items()
            },
        }


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint and its selected tensors, sorted by name."""

    checkpoint: OpenCheckpoint
    tensors: Sequence[TensorSummary]

    @property
    def elements(self) -> int:
        return sum(summary.tensor.numel for summary in self.tensors)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Size of the selected tensors, by kind."""
        sizes: dict[str, int] = {}
        for summary in self.tensors:
            for kind, dtype in summary.tensor.kinds.items():
                sizes[kind] = sizes.get(kind, 0) + summary.tensor.numel * ITEM_BYTES[dtype]
        return sizes

    @property
    def norm(self) -> float | None:
        """Norm of all selected weights; None if no values were read."""
        weights = [summary.stats.get(summary.tensor.weight_kind) for summary in self.tensors]
        squares = [stats.squares for stats in weights if stats]
        return math.sqrt(math.fsum(squares)) if squares else None

    def to_json(self) -> dict[str, Any]:
        """All fields, and the stored record."""
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
    """The tensors whose names match any of the shell patterns, in file order; default: all tensors.

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
    """Summarizes a checkpoint.

    Args:
        patterns: shell patterns of tensor names; default: all tensors.
        with_values: read the weights, which also verifies their digests, instead of the manifest only.
        with_moments: also read the other stored kinds.

    Raises:
        CheckpointError: a pattern matches no tensor.
        DamagedError: the checkpoint is damaged.
    """
    chosen = chosen_tensors(checkpoint, patterns)
    stats: dict[str, dict[Kind, ValueStats]] = {name: {} for name in chosen}
    read = (
        (tensor.name, kind, tensor.shape)
        for tensor in (chosen.values() if with_values else ())
        for kind in (tensor.kinds if with_moments else (tensor.weight_kind,))
    )
    for batch in batches(read):
        for key, values in zip(batch, checkpoint.read(batch), strict=True):
            stats[key.name].setdefault(key.kind, ValueStats()).add(values)
    return CheckpointSummary(checkpoint, [TensorSummary(chosen[name], stats[name]) for name in sorted(chosen)])


def summary_lines(summary: CheckpointSummary) -> Iterator[str]:
    """Formats a summary: the run, a table of tensors, and the configuration without defaults."""
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
    """Formats rows as columns; the first `texts` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for index, row in enumerate((heading, *rows)):
        cells = [
            cell.ljust(width) if number < texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " | ".join(cells).rstrip()
        if index == 0:
            yield "-" * (sum(widths) + 3 * (len(widths) - 1))


def size_text(size_bytes: float) -> str:
    """A size with its unit, to four significant digits."""
    power = min(len(_UNITS) - 1, int(math.log10(size_bytes) // 3)) if size_bytes >= 1 else 0
    return f"{size_bytes / 1000**power:.4g} {_UNITS[power]}"


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a stored configuration by "section.field", without their provenance."""
    return {
        f"{section}.{name}": value
        for section, entries in config.items()
        if section != "provenance" and isinstance(entries, Mapping)
        for name, value in entries.items()
    }


def heading(checkpoint: OpenCheckpoint) -> Iterator[str]:
    """Formats the path, the progress and the tokenizer of a checkpoint."""
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
    """Formats a shape."""
    return "[" + ", ".join(map(str, shape)) + "]"


def value_text(value: Any) -> str:
    """Formats a value, truncated."""
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _tensor_rows(summary: TensorSummary) -> Iterator[tuple[str, ...]]:
    """Rows of the kinds that were read; without any, one row that names all kinds."""
    tensor = summary.tensor
    for kind, stats in summary.stats.items():
        yield (tensor.name, shape_text(tensor.shape), kind, tensor.kinds[kind], *_stats(stats))
    if tensor.kinds and not summary.stats:
        types = dict.fromkeys(tensor.kinds.values())
        yield (tensor.name, shape_text(tensor.shape), " ".join(tensor.kinds), " ".join(types), "", "", "", "")


def _stats(stats: ValueStats) -> tuple[str, ...]:
    if not stats.finite:
        return ("", "", "", f"{stats.not_finite} not finite")
    mean = stats.total / stats.finite
    largest = f"{stats.largest:.4g}"
    if stats.not_finite:
        largest += f", {stats.not_finite} not finite"
    return (f"{stats.norm:.6g}", f"{mean:.3g}", f"{stats.smallest:.4g}", largest)


def _config_lines(checkpoint: OpenCheckpoint) -> Iterator[str]:
    config = checkpoint.record.config
    given = {name for name, source in dict(config.get("provenance", {})).items() if source != "default"}
    for name, value in flat_config(config).items():
        if not given or name in given:
            yield f"{name} = {value_text(value)}"

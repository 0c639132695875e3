"""Compares two checkpoints: their tensors, values, configuration and progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.catalogue import CheckpointTensor
from megatron.checkpoint.layout import is_regrouped
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.parallel.pieces import Kind
from trident.checkpoints.slices import batches
from trident.checkpoints.summary import chosen_tensors, flat_config, heading, shape_text, table, value_text


@dataclass
class TensorDifference:
    """Difference statistics of one kind of one tensor, accumulated slice by slice in float64.

    NaN equals NaN; an element that is finite in only one checkpoint differs by infinity.

    Args:
        largest_relative: the largest |a - b| / max(|a|, |b|) of an element.
    """

    name: str
    kind: Kind
    elements: int = 0
    different: int = 0
    largest_absolute: float = 0.0
    largest_relative: float = 0.0
    squares: float = 0.0
    squares_first: float = 0.0

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Adds a slice of both tensors."""
        if first.dtype != second.dtype:
            first, second = first.double(), second.double()
        self.elements += first.numel()
        squares = float(torch.linalg.vector_norm(first, dtype=torch.float64)) ** 2
        if not math.isfinite(squares):
            squares = float(first.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
        self.squares_first += squares
        if torch.equal(first, second):
            return
        differs = (first != second) & ~(first.isnan() & second.isnan())
        self.different += int(differs.sum())
        if not differs.any():
            return
        a, b = first[differs].double(), second[differs].double()
        absolute = (a - b).abs().nan_to_num(math.inf, math.inf)
        relative = (absolute / torch.maximum(a.abs(), b.abs())).nan_to_num(math.inf, math.inf)
        self.largest_absolute = max(self.largest_absolute, float(absolute.max()))
        self.largest_relative = max(self.largest_relative, float(relative.max()))
        self.squares += float(absolute.square().sum())

    @property
    def relative_norm(self) -> float:
        """Norm of the difference divided by the norm of the first tensor."""
        if self.squares == 0:
            return 0.0
        return math.sqrt(self.squares / self.squares_first) if self.squares_first else math.inf

    def to_json(self) -> dict[str, Any]:
        """All statistics; JSON has no infinity, it becomes null."""
        statistics = {
            "largest_absolute": self.largest_absolute,
            "largest_relative": self.largest_relative,
            "relative_norm": self.relative_norm,
        }
        return {
            "name": self.name,
            "kind": self.kind,
            "elements": self.elements,
            "different": self.different,
            **{name: value if math.isfinite(value) else None for name, value in statistics.items()},
        }


@dataclass(frozen=True)
class Change:
    """A field with different values; None for a checkpoint without the field."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Comparison:
    """The differences of two checkpoints; `differences` has an entry for every compared tensor."""

    first: OpenCheckpoint
    second: OpenCheckpoint
    only_first: Sequence[str]
    only_second: Sequence[str]
    other_shape: Sequence[Change]
    differences: Sequence[TensorDifference]
    config: Sequence[Change]
    progress: Sequence[Change]

    @property
    def holds_same_tensors(self) -> bool:
        """True if both hold the same tensors with the same values, bit for bit except for the sign of zero."""
        same_names = not (self.only_first or self.only_second or self.other_shape)
        return same_names and not any(entry.different for entry in self.differences)

    def to_json(self) -> dict[str, Any]:
        return {
            "first": str(self.first.folder),
            "second": str(self.second.folder),
            "is_equal": self.holds_same_tensors,
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "other_shape": [vars(change) for change in self.other_shape],
            "differences": [entry.to_json() for entry in self.differences],
            "config": [vars(change) for change in self.config],
            "progress": [vars(change) for change in self.progress],
        }


def compare(
    first: OpenCheckpoint,
    second: OpenCheckpoint,
    patterns: Sequence[str] = (),
    *,
    with_moments: bool = False,
) -> Comparison:
    """Compares two checkpoints of any layouts in constant memory.

    Args:
        patterns: shell patterns of tensor names; default: all tensors.
        with_moments: also compare the optimizer moments that both hold.

    Raises:
        CheckpointError: a pattern matches no tensor of the first.
        DamagedError: a checkpoint is damaged.
    """
    ours, theirs = chosen_tensors(first, patterns), second.tensors()
    if patterns:
        theirs = {name: tensor for name, tensor in theirs.items() if name in ours}
    both = [name for name in ours if name in theirs]
    fitting = [name for name in both if is_regrouped(ours[name].shape, theirs[name].shape)]
    by_tensor: dict[tuple[str, Kind], TensorDifference] = {}
    read = (
        (name, kind, ours[name].shape) for name in fitting for kind in _kinds(ours[name], theirs[name], with_moments)
    )
    for batch in batches(read):
        for key, one, other in zip(batch, first.read(batch), second.read(batch), strict=True):
            by_tensor.setdefault((key.name, key.kind), TensorDifference(key.name, key.kind)).add(one, other)
    return Comparison(
        first,
        second,
        sorted(set(ours) - set(theirs)),
        sorted(set(theirs) - set(ours)),
        [Change(name, list(ours[name].shape), list(theirs[name].shape)) for name in sorted(set(both) - set(fitting))],
        [by_tensor[key] for key in sorted(by_tensor)],
        list(_changes(flat_config(first.record.config), flat_config(second.record.config))),
        list(_changes(first.record.progress.to_json(), second.record.progress.to_json())),
    )


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Formats a comparison: unmatched tensors, a table of differing tensors, differing fields, and a verdict."""
    yield from heading(comparison.first)
    yield from heading(comparison.second)
    for which, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        for name in names:
            yield f"only in the {which}: {name}"
    for change in comparison.other_shape:
        yield f"of another shape: {change.field} {shape_text(change.first)} and {shape_text(change.second)}"
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
        columns = ("tensor", "kind", "elements", "largest absolute", "largest relative", "norm ratio")
        yield from table(columns, rows, texts=2)
    for change in (*comparison.config, *comparison.progress):
        yield f"{change.field}: {value_text(change.first)} and {value_text(change.second)}"
    if comparison.holds_same_tensors:
        yield f"EQUAL: all {len(comparison.differences)} tensors, bit for bit"
        return
    unmatched = len(comparison.only_first) + len(comparison.only_second) + len(comparison.other_shape)
    largest = max((entry.largest_absolute for entry in different), default=0.0)
    yield (
        f"DIFFERENT: {len(different)} of {len(comparison.differences)} compared tensors (largest absolute difference "
        f"{largest:.3g}), and {unmatched} that could not be compared"
    )


def _kinds(one: CheckpointTensor, other: CheckpointTensor, with_moments: bool) -> Iterator[Kind]:
    yield "weight"  # read from the fp32 master weight if only that is stored
    if with_moments:
        moments: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
        yield from (kind for kind in moments if kind in one.kinds and kind in other.kinds)


def _changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Change(name, one.get(name), other.get(name))

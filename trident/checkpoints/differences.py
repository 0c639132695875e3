"""How two checkpoints differ: in tensors, in values of the tensors both hold, in configuration and progress."""

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
    """How the values of one kind of one tensor differ, collected slice by slice in float64.

    Two NaN are equal; a value that is finite in one checkpoint only differs by infinity.

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
        """Adds the values of one more slice."""
        if first.dtype != second.dtype:
            first, second = first.double(), second.double()
        self.elements += first.numel()
        squares = float(torch.linalg.vector_norm(first, dtype=torch.float64)) ** 2
        if not math.isfinite(squares):
            squares = float(first.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
        self.squares_first += squares
        if torch.equal(first, second):
            return
        apart = (first != second) & ~(first.isnan() & second.isnan())
        self.different += int(apart.sum())
        if not apart.any():
            return
        a, b = first[apart].double(), second[apart].double()
        absolute = (a - b).abs().nan_to_num(math.inf, math.inf)
        relative = (absolute / torch.maximum(a.abs(), b.abs())).nan_to_num(math.inf, math.inf)
        self.largest_absolute = max(self.largest_absolute, float(absolute.max()))
        self.largest_relative = max(self.largest_relative, float(relative.max()))
        self.squares += float(absolute.square().sum())

    @property
    def relative_norm(self) -> float:
        """The norm of the difference over the norm of the first tensor."""
        if self.squares == 0:
            return 0.0
        return math.sqrt(self.squares / self.squares_first) if self.squares_first else math.inf

    def to_json(self) -> dict[str, Any]:
        """All figures; infinity as null, because JSON has none."""
        figures = {
            "largest_absolute": self.largest_absolute,
            "largest_relative": self.largest_relative,
            "relative_norm": self.relative_norm,
        }
        return {
            "name": self.name,
            "kind": self.kind,
            "elements": self.elements,
            "different": self.different,
            **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        }


@dataclass(frozen=True)
class Change:
    """A field that has different values; None where a checkpoint does not have it."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ; `differences` has an entry for every tensor that was compared."""

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
        """Whether both hold the same tensors with the same values, bit for bit except for signs of zero."""
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
    """Compares two checkpoints, of whatever layouts, in constant memory.

    Args:
        patterns: shell patterns of tensor names; all tensors without one.
        with_moments: compare the moments that both hold, too.

    Raises:
        CheckpointError: a pattern matches no tensor of the first.
        DamagedError: the bytes are not those that were written.
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
    """A comparison: what only one has, tensors that differ as a table, fields that differ, and a verdict."""
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
    apart = [*comparison.only_first, *comparison.only_second, *(change.field for change in comparison.other_shape)]
    largest = max((entry.largest_absolute for entry in different), default=0.0)
    yield (
        f"DIFFERENT: {len(different)} of the {len(comparison.differences)} tensors that were compared (largest "
        f"absolute difference {largest:.3g}), and {len(apart)} that could not be compared"
    )


def _kinds(one: CheckpointTensor, other: CheckpointTensor, with_moments: bool) -> Iterator[Kind]:
    yield "weight"  # read from the fp32 master where only that is stored
    if with_moments:
        moments: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
        yield from (kind for kind in moments if kind in one.kinds and kind in other.kinds)


def _changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Change(name, one.get(name), other.get(name))

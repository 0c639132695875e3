"""A parameter's place: its logical global shape, the mesh axes that split it, and who accounts for it.

Initial values, optimizer groups, gradient norms, parameter counts, checkpoints and conversion all read this one
description; a parameter carries it as `parameter.shard_spec`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from megatron.errors import ConfigError
from megatron.parallel.mesh import Axis, ParallelMesh


@dataclass(frozen=True)
class Dimension:
    """One dimension of a parameter's logical shape.

    Args:
        name: what it counts, as in "heads" or "hidden".
        size: entries of the global tensor, without padding.
        axis: the mesh axis whose ranks hold equal consecutive parts; None if every rank holds all entries.
        padded_size: entries including padding, which follows the real ones; None if there is no padding.
    """

    name: str
    size: int
    axis: Axis | None = None
    padded_size: int | None = None

    @property
    def local_size(self) -> int:
        """Entries this rank stores, padding included."""
        stored = self.size if self.padded_size is None else self.padded_size
        return stored if self.axis is None else stored // self.axis.size

    @property
    def bounds(self) -> tuple[int, int]:
        """First real entry that this rank stores, and one beyond the last; equal if it stores padding only."""
        first = 0 if self.axis is None else self.axis.rank * self.local_size
        return min(first, self.size), min(first + self.local_size, self.size)


@dataclass(frozen=True)
class ShardSpec:
    """Everything about a parameter's place.

    The tensor that a module holds may merge neighbouring dimensions: a fused query-key-value weight of logical shape
    `[heads, 3, head size, hidden]` is stored as a matrix. Both have the same elements in the same row-major order.

    Args:
        dimensions: the logical shape; only the first dimension may be padded.
        is_matrix: whether the parameter maps features to features. Matrices are drawn at random and decay; biases and
            norm weights start as their layer made them and do not decay.
        init_std: standard deviation of a matrix's initial values; 0 leaves it zero.
        summed_over: axes over whose ranks the gradient must be summed because each rank saw other tokens.
        is_tied_copy: whether another pipeline stage holds the same weight and accounts for it.

    Raises:
        ConfigError: a dimension cannot be split evenly, two dimensions are split by one axis, or a later dimension is
            padded.
    """

    dimensions: tuple[Dimension, ...]
    is_matrix: bool = False
    init_std: float = 0.0
    summed_over: tuple[Axis, ...] = ()
    is_tied_copy: bool = False

    def __post_init__(self) -> None:
        for number, dimension in enumerate(self.dimensions):
            if dimension.padded_size is not None and number > 0:
                raise ConfigError(
                    f"dimension {number} ({dimension.name}) of a parameter is padded; only the first dimension may be."
                )
            if dimension.axis is not None:
                stored = dimension.size if dimension.padded_size is None else dimension.padded_size
                check_divisible(stored, dimension.axis, dimension.name)
        names = self.split_axes
        if len(set(names)) < len(names):
            raise ConfigError(
                f"a parameter of shape {list(self.shape)} is split twice by one axis ({', '.join(names)})."
            )

    @classmethod
    def vector(cls, size: int, axis: Axis | None = None, *, name: str = "features") -> ShardSpec:
        """A bias or a norm weight, split over `axis` if there is one.

        Shapes: `[size]`, of which a rank holds `[size/t]`.
        """
        return cls((Dimension(name, size, axis),))

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical global shape, without padding."""
        return tuple(dimension.size for dimension in self.dimensions)

    @property
    def start(self) -> tuple[int, ...]:
        """First global index that this rank holds, in each dimension."""
        return tuple(dimension.bounds[0] for dimension in self.dimensions)

    @property
    def stop(self) -> tuple[int, ...]:
        """One beyond the last global index that this rank holds, in each dimension."""
        return tuple(dimension.bounds[1] for dimension in self.dimensions)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What this rank stores, padding included."""
        return tuple(dimension.local_size for dimension in self.dimensions)

    @property
    def box_shape(self) -> tuple[int, ...]:
        """What this rank stores without padding; the box starts at the first element of the local tensor."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def box_numel(self) -> int:
        """Elements this rank stores, without padding."""
        return math.prod(self.box_shape)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Names of the axes that split the parameter."""
        return tuple(dimension.axis.name for dimension in self.dimensions if dimension.axis is not None)

    def is_counted(self, mesh: ParallelMesh) -> bool:
        """Whether this rank accounts for its part among the ranks that hold a copy of it.

        Ranks of the data-parallel group hold copies too; who of them writes what is the optimizer's business.
        """
        if self.is_tied_copy:
            return False
        return all(axis.rank == 0 for axis in mesh.axes_of("tensor") if axis.name not in self.split_axes)

    def as_tied_copy(self) -> ShardSpec:
        """The same place for a copy that another pipeline stage accounts for."""
        return dataclasses.replace(self, is_tied_copy=True)


def place(parameter: torch.nn.Parameter, spec: ShardSpec) -> torch.nn.Parameter:
    """Attaches a description to a parameter.

    Raises:
        ConfigError: the parameter does not have as many elements as this rank's part.
    """
    if parameter.numel() != math.prod(spec.local_shape):
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} cannot be the local part {list(spec.local_shape)} of a "
            f"tensor of shape {list(spec.shape)}."
        )
    parameter.shard_spec = spec  # type: ignore[attr-defined]
    return parameter


def shard_spec_of(parameter: torch.Tensor) -> ShardSpec:
    """The description of a parameter; whole on every rank if none was attached."""
    spec: ShardSpec | None = getattr(parameter, "shard_spec", None)
    if spec is not None:
        return spec
    return ShardSpec(tuple(Dimension("size", size) for size in parameter.shape), is_matrix=parameter.dim() > 1)


def check_divisible(number: int, axis: Axis, what: str) -> None:
    """Checks that an axis cuts `number` entries into equal parts.

    Raises:
        ConfigError: it does not.
    """
    if number % axis.size:
        flag = "--tensor-model-parallel-size" if axis.name == "tp" else f"size of the {axis.name} axis:"
        raise ConfigError(
            f"{number} {what} cannot be split over {axis.size} ranks ({flag} {axis.size}). The number must be a "
            f"multiple of the ranks."
        )

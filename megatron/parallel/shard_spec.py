"""The sharding of a parameter: its logical global shape, the mesh axes that split it, and the ranks that count it.

Initialization, optimizer parameter groups, gradient norms, parameter counts, checkpoints and conversion all use this
description, which is stored as `parameter.shard_spec`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.errors import ConfigError
from megatron.kernels.initial_values import Distribution
from megatron.parallel.mesh import Axis, ParallelMesh


@dataclass(frozen=True)
class Dimension:
    """One dimension of a parameter's logical shape.

    Args:
        name: what it indexes, such as "heads" or "hidden".
        size: entries of the global tensor, without padding.
        axis: the mesh axis that splits it into equal consecutive parts; None if it is replicated.
        padded_size: entries with trailing padding; None without padding.
        parts: sizes of the separate matrices that are concatenated along this dimension, such as queries, key and
            value; empty for a single matrix. If an axis splits the dimension, every entry is a part.
    """

    name: str
    size: int
    axis: Axis | None = None
    padded_size: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def local_size(self) -> int:
        """Number of entries that this rank stores, padding included."""
        stored = self.size if self.padded_size is None else self.padded_size
        return stored if self.axis is None else stored // self.axis.size

    @property
    def bounds(self) -> tuple[int, int]:
        """Half-open range of the unpadded entries that this rank stores; empty if it stores only padding."""
        first = 0 if self.axis is None else self.axis.rank * self.local_size
        return min(first, self.size), min(first + self.local_size, self.size)


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of one parameter.

    The tensor that a module stores may merge adjacent dimensions: a fused query-key-value weight of logical shape
    `[heads, 3, head size, hidden]` is stored as a matrix. Both have the same elements in the same row-major order.

    Args:
        dimensions: the logical shape; only the first dimension may be padded.
        is_matrix: the parameter is a weight matrix. Matrices are initialized randomly and have weight decay; biases and
            norm weights keep their layer's initial values and have no weight decay.
        init_std: standard deviation of a matrix's initial values; 0 leaves it zero.
        init_distribution: their distribution; `init_std` applies before truncation.
        lr_multiplier: factor of the learning rate for this parameter.
        summed_over: axes over which the gradient must be summed because each rank saw different tokens.
        is_tied_copy: this is a copy of a weight that another pipeline stage owns and counts.

    Raises:
        ConfigError: a dimension cannot be split evenly, two dimensions are split over the same axis, or a dimension
            other than the first is padded.
    """

    dimensions: tuple[Dimension, ...]
    is_matrix: bool = False
    init_std: float = 0.0
    init_distribution: Distribution = Distribution.NORMAL
    lr_multiplier: float = 1.0
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
                f"a parameter of shape {list(self.shape)} is split twice over the same axis ({', '.join(names)})."
            )

    @classmethod
    def vector(
        cls, size: int, axis: Axis | None = None, *, name: str = "features", partial: Axis | None = None
    ) -> ShardSpec:
        """The spec of a bias or norm weight, split over `axis` if given.

        Shapes: `[size]`; `[size/t]` on a rank.

        Args:
            partial: the axis of `summed_over`, if any.
        """
        return cls((Dimension(name, size, axis),), summed_over=() if partial is None else (partial,))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical global shape, without padding."""
        return tuple(dimension.size for dimension in self.dimensions)

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The first global index that this rank holds, per dimension."""
        return tuple(dimension.bounds[0] for dimension in self.dimensions)

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """One past the last global index that this rank holds, per dimension."""
        return tuple(dimension.bounds[1] for dimension in self.dimensions)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that this rank stores, padding included."""
        return tuple(dimension.local_size for dimension in self.dimensions)

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape that this rank stores without padding; the box starts at the first element of the local tensor."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def box_numel(self) -> int:
        """Number of elements that this rank stores, without padding."""
        return math.prod(self.box_shape)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Names of the axes that split the parameter."""
        return tuple(dimension.axis.name for dimension in self.dimensions if dimension.axis is not None)

    def replicas(self, mesh: ParallelMesh) -> Axis:
        """The ranks that hold copies of the shard and compute on other samples or tokens."""
        return mesh.expert_gradient if mesh.ep.name in self.split_axes else mesh.gradient

    def is_counted(self, mesh: ParallelMesh) -> bool:
        """Returns True if this rank counts its shard, among the ranks of a model replica that hold a copy.

        `engine.state` decides which data-parallel replica writes which part.
        """
        if self.is_tied_copy:
            return False
        return all(axis.rank == 0 for axis in mesh.axes_of("tensor") if axis.name not in self.split_axes)

    def as_tied_copy(self) -> ShardSpec:
        """The spec of a copy of a weight that another pipeline stage counts."""
        return dataclasses.replace(self, is_tied_copy=True)


def annotate(parameter: torch.nn.Parameter, spec: ShardSpec) -> torch.nn.Parameter:
    """Attaches a spec to a parameter.

    Raises:
        ConfigError: the number of elements does not fit this rank's shard.
    """
    if parameter.numel() != math.prod(spec.local_shape):
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} cannot be the local part {list(spec.local_shape)} of a "
            f"tensor of shape {list(spec.shape)}."
        )
    parameter.shard_spec = spec  # type: ignore[attr-defined]
    return parameter


def shard_spec_of(parameter: torch.Tensor) -> ShardSpec:
    """The spec of a parameter; a parameter without one is replicated."""
    spec: ShardSpec | None = getattr(parameter, "shard_spec", None)
    if spec is not None:
        return spec
    return ShardSpec(tuple(Dimension("size", size) for size in parameter.shape), is_matrix=parameter.dim() > 1)


def check_divisible(number: int, axis: Axis, noun: str) -> None:
    """Raises a ConfigError unless `number` entries can be split evenly over an axis."""
    if number % axis.size:
        flags = {"tp": "--tensor-model-parallel-size", "ep": "--expert-model-parallel-size"}
        flag = flags.get(axis.name, f"size of the {axis.name} axis:")
        raise ConfigError(
            f"{number} {noun} cannot be split over {axis.size} ranks ({flag} {axis.size}). The number must be a "
            f"multiple of the ranks."
        )

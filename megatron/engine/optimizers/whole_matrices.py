"""Gathers divided matrices on their owner ranks, and scatters the results.

A matrix is divided twice: over tensor-parallel ranks along one dimension, and with ZeRO into flat ranges over the ranks
that hold copies of the shard. For each division, one of its ranks owns the matrix. Owners follow from the shapes, so
ranks agree on them without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import exchange_parts
from megatron.parallel.shard_spec import Dimension, ShardSpec

_BUCKET_ELEMENTS = 2**28  # the most in transit at once


@dataclass(frozen=True)
class DividedMatrix:
    """A parameter of one or several matrices, divided over ranks.

    Args:
        spec: its shape and this rank's shard.
        replicas: the ranks that hold copies or ranges of the shard.
        ranges: the first element and the number of elements of each replica's flat range of the shard.
    """

    spec: ShardSpec
    replicas: Axis
    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def split_dimension(self) -> int | None:
        """The dimension that tensor-parallel ranks divide; None if each has whole matrices, such as whole experts."""
        divided = (
            number
            for number, dimension in enumerate(self.spec.dimensions)
            if dimension.axis is not None and dimension.axis.size > 1 and not _is_list(dimension)
        )
        return next(divided, None)

    @property
    def tensor_axis(self) -> Axis | None:
        number = self.split_dimension
        return None if number is None else self.spec.dimensions[number].axis

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        return tuple(
            dimension.size if number == self.split_dimension else dimension.local_size
            for number, dimension in enumerate(self.spec.dimensions)
        )

    @cached_property
    def shard_numel(self) -> int:
        return torch.Size(self.spec.local_shape).numel()

    @cached_property
    def is_held_whole(self) -> bool:
        return all(pair == (0, self.shard_numel) for pair in self.ranges)

    @cached_property
    def cost(self) -> int:
        """The cost of orthogonalizing it, up to a constant factor."""
        shapes = [part.shape for part in self.matrices(torch.empty(self.whole_shape, device="meta"))]
        return sum(rows * columns * min(rows, columns) for rows, columns in shapes)

    def matrices(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """The matrices of a whole tensor: views, or copies if their rows are not contiguous.

        Shapes: `whole_shape`; each matrix `[outputs, inputs]`.
        """
        for box in _boxes(whole, self.spec.dimensions):
            yield box.reshape(-1, box.shape[-1])

    def replace(self, whole: torch.Tensor, matrices: Iterable[torch.Tensor]) -> None:
        """Writes the transformed `matrices` to the whole tensor."""
        for box, matrix in zip(_boxes(whole, self.spec.dimensions), matrices, strict=True):
            box.copy_(matrix.view(box.shape))


class WholeMatrices:
    """Matrices that are divided over the same ranks.

    Args:
        matrices: of this rank's layers, in the same order on all ranks that divide them.
    """

    def __init__(self, matrices: Sequence[DividedMatrix]) -> None:
        self._matrices = matrices
        self._replicas = matrices[0].replicas
        self._tensor = matrices[0].tensor_axis
        self._owners = _owners(matrices, self._replicas.size)

    @classmethod
    def buckets(cls, matrices: Sequence[DividedMatrix]) -> list[tuple[list[int], WholeMatrices]]:
        """Divides matrices into buckets of limited size over the same ranks, each with the indices of its matrices."""
        by_ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, matrix in enumerate(matrices):
            axis = matrix.tensor_axis
            by_ranks.setdefault((matrix.replicas.ranks, () if axis is None else axis.ranks), []).append(number)
        buckets: list[list[int]] = []
        for numbers in by_ranks.values():
            elements = _BUCKET_ELEMENTS
            for number in numbers:
                elements += matrices[number].shard_numel
                if elements > _BUCKET_ELEMENTS:
                    buckets.append([])
                    elements = matrices[number].shard_numel
                buckets[-1].append(number)
        return [(bucket, cls([matrices[number] for number in bucket])) for bucket in buckets]

    def transform(self, parts: Sequence[torch.Tensor], transform: Callable[..., None]) -> None:
        """Transforms whole tensors on their owners, and copies the results to this rank's parts; collective.

        Shapes: each part `[n]`, this rank's range of the matrix; it may be empty.

        Args:
            transform: called with the matrices that this rank owns and their tensors, which it changes in place.
        """
        shards = self._gather(parts)
        numbers = list(shards)
        empty = parts[0].new_empty(0)  # on the device, even if this rank owns no shard
        wholes, owners = self._join(numbers, [shards[number] for number in numbers], empty)
        rank = 0 if self._tensor is None else self._tensor.rank
        owned = [index for index, owner in enumerate(owners) if owner == rank]
        transform([self._matrices[numbers[index]] for index in owned], [wholes[index] for index in owned])
        divided = self._divide(numbers, wholes, owners, empty)
        self._scatter(dict(zip(numbers, divided, strict=True)), parts)

    def _owned_by(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == rank]

    def _gather(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The shards that this rank owns, by the index of the matrix."""
        axis, owned = self._replicas, self._owned_by(self._replicas.rank)
        if all(matrix.is_held_whole for matrix in self._matrices):
            return {number: parts[number] for number in owned}
        empty = parts[0].new_empty(0)
        sent = [torch.cat([empty, *(parts[number] for number in self._owned_by(rank))]) for rank in range(axis.size)]
        sizes = [sum(self._matrices[number].ranges[rank][1] for number in owned) for rank in range(axis.size)]
        received = exchange_parts(sent, sizes, axis)
        shards = {number: empty.new_zeros(self._matrices[number].shard_numel) for number in owned}
        for rank, values in enumerate(received):
            ranges = [self._matrices[number].ranges[rank] for number in owned]
            for number, (first, count), part in zip(owned, ranges, values.split([n for _, n in ranges]), strict=True):
                shards[number].narrow(0, first, count).copy_(part)
        return shards

    def _scatter(self, shards: Mapping[int, torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Sends every rank its ranges of the shards that this rank owns."""
        axis, empty = self._replicas, parts[0].new_empty(0)
        sent = []
        for rank in range(axis.size):
            ranges = ((shard, *self._matrices[number].ranges[rank]) for number, shard in shards.items())
            sent.append(torch.cat([empty, *(shard.narrow(0, first, count) for shard, first, count in ranges)]))
        owned = [self._owned_by(rank) for rank in range(axis.size)]
        received = exchange_parts(sent, [sum(len(parts[number]) for number in numbers) for numbers in owned], axis)
        for numbers, values in zip(owned, received, strict=True):
            sizes = [len(parts[number]) for number in numbers]
            for number, part in zip(numbers, values.split(sizes), strict=True):
                parts[number].copy_(part)

    def _join(
        self, numbers: list[int], shards: list[torch.Tensor], empty: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The whole tensors that this rank owns, empty ones for the others, and the owners of all."""
        axis, matrices = self._tensor, [self._matrices[number] for number in numbers]
        if axis is None:
            pairs = zip(matrices, shards, strict=True)
            return [shard.clone().view(matrix.whole_shape) for matrix, shard in pairs], [0] * len(shards)
        owners = _owners(matrices, axis.size)
        owned = [index for index, owner in enumerate(owners) if owner == axis.rank]
        sent = [
            torch.cat([empty, *(shards[index] for index, owner in enumerate(owners) if owner == rank)])
            for rank in range(axis.size)
        ]
        count = sum(matrices[index].shard_numel for index in owned)
        received = [
            values.split([matrices[index].shard_numel for index in owned])
            for values in exchange_parts(sent, [count] * axis.size, axis)
        ]
        wholes = [empty] * len(shards)
        for position, index in enumerate(owned):
            shape, dimension = matrices[index].spec.local_shape, matrices[index].split_dimension or 0
            wholes[index] = torch.cat([values[position].view(shape) for values in received], dim=dimension)
        return wholes, owners

    def _divide(
        self, numbers: list[int], wholes: list[torch.Tensor], owners: list[int], empty: torch.Tensor
    ) -> list[torch.Tensor]:
        """This rank's shards of the whole tensors on the owners."""
        axis, matrices = self._tensor, [self._matrices[number] for number in numbers]
        if axis is None:
            return [whole.view(-1) for whole in wholes]
        owned = [index for index, owner in enumerate(owners) if owner == axis.rank]
        chunks = [wholes[index].chunk(axis.size, dim=matrices[index].split_dimension or 0) for index in owned]
        sent = [torch.cat([empty, *(each[rank].reshape(-1) for each in chunks)]) for rank in range(axis.size)]
        owned_by = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)]
        sizes = [[matrices[index].shard_numel for index in indices] for indices in owned_by]
        shards = [empty] * len(wholes)
        received = exchange_parts(sent, [sum(each) for each in sizes], axis)
        for indices, counts, values in zip(owned_by, sizes, received, strict=True):
            for index, shard in zip(indices, values.split(counts), strict=True):
                shards[index] = shard
        return shards


def _owners(matrices: Sequence[DividedMatrix], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix; assigns the most expensive first, to the rank with the least work."""
    loads, owners = [0] * ranks, [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda number: -matrices[number].cost):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += matrices[number].cost
    return owners


def _is_list(dimension: Dimension) -> bool:
    """Returns True if every entry of a dimension is a separate matrix."""
    return len(dimension.parts) == dimension.size


def _boxes(whole: torch.Tensor, dimensions: Sequence[Dimension]) -> list[torch.Tensor]:
    """The separate matrices of a tensor; views."""
    boxes = [whole]
    for number, dimension in enumerate(dimensions):
        if dimension.parts:
            sizes = [1] * whole.shape[number] if _is_list(dimension) else list(dimension.parts)
            boxes = [part for box in boxes for part in box.split(sizes, dim=number)]
    return boxes

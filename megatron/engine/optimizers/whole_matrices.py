"""Brings the parts of matrices together on the ranks that own them, and takes what these make of them apart again.

A matrix is divided twice: over tensor-parallel ranks along one dimension, and with ZeRO into flat ranges over the ranks
that hold copies of the shard. Each matrix has one owner among the latter, and there one among the former; everything
else follows from the shapes, so that all ranks agree on the owners without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import exchange_parts
from megatron.parallel.shard_spec import Dimension, ShardSpec

_BUCKET_ELEMENTS = 2**28  # of the shards that are under way at once


@dataclass(frozen=True)
class DividedMatrix:
    """A parameter that joins one matrix or several, and where its elements are.

    Args:
        spec: its shape and this rank's shard of it.
        replicas: the ranks that hold copies of the shard, or ranges of it.
        ranges: the first element and the number of elements that each of them holds, flat in the shard.
    """

    spec: ShardSpec
    replicas: Axis
    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def split_dimension(self) -> int | None:
        """The dimension that tensor-parallel ranks divide; None if each has all of it.

        That of experts, each of which is a matrix, is none: a rank orthogonalises those it has.
        """
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
        """What an orthogonalisation takes, in multiplications of a constant number."""
        shapes = [part.shape for part in self.matrices(torch.empty(self.whole_shape, device="meta"))]
        return sum(rows * columns * min(rows, columns) for rows, columns in shapes)

    def matrices(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """The matrices that a whole tensor joins: views, or copies where rows do not follow each other.

        Shapes: `whole_shape`; each matrix `[outputs, inputs]`.
        """
        for box in _boxes(whole, self.spec.dimensions):
            yield box.reshape(-1, box.shape[-1])

    def replace(self, whole: torch.Tensor, matrices: Iterable[torch.Tensor]) -> None:
        """Writes what became of `matrices` into the whole tensor."""
        for box, matrix in zip(_boxes(whole, self.spec.dimensions), matrices, strict=True):
            box.copy_(matrix.view(box.shape))


class WholeMatrices:
    """Matrices that are divided over the same ranks.

    Args:
        matrices: those of this rank's layers, in the same order on all ranks that divide them.
    """

    def __init__(self, matrices: Sequence[DividedMatrix]) -> None:
        self._matrices = matrices
        self._replicas = matrices[0].replicas
        self._tensor = matrices[0].tensor_axis
        self._owners = _owners(matrices, self._replicas.size)

    @classmethod
    def buckets(cls, matrices: Sequence[DividedMatrix]) -> list[tuple[list[int], WholeMatrices]]:
        """Matrices that are divided over the same ranks, a limited number of elements each, with their numbers."""
        alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, matrix in enumerate(matrices):
            axis = matrix.tensor_axis
            alike.setdefault((matrix.replicas.ranks, () if axis is None else axis.ranks), []).append(number)
        buckets: list[list[int]] = []
        for numbers in alike.values():
            elements = _BUCKET_ELEMENTS
            for number in numbers:
                elements += matrices[number].shard_numel
                if elements > _BUCKET_ELEMENTS:
                    buckets.append([])
                    elements = matrices[number].shard_numel
                buckets[-1].append(number)
        return [(bucket, cls([matrices[number] for number in bucket])) for bucket in buckets]

    def transform(self, parts: Sequence[torch.Tensor], transform: Callable[..., None]) -> None:
        """Has the owners change whole tensors in place, and copies the results into this rank's parts; collective.

        Shapes: each part `[n]`, this rank's range of the matrix; it may be empty.

        Args:
            transform: called with the matrices that this rank owns and their tensors.
        """
        shards = self._gather(parts)
        mine = list(shards)
        nothing = parts[0].new_empty(0)  # on the device, also where this rank owns no shard
        wholes, owners = self._join(mine, [shards[number] for number in mine], nothing)
        rank = 0 if self._tensor is None else self._tensor.rank
        owned = [place for place, owner in enumerate(owners) if owner == rank]
        transform([self._matrices[mine[place]] for place in owned], [wholes[place] for place in owned])
        divided = self._divide(mine, wholes, owners, nothing)
        self._scatter(dict(zip(mine, divided, strict=True)), parts)

    def _owned_by(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == rank]

    def _gather(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The shards that this rank owns, by their numbers."""
        axis, own = self._replicas, self._owned_by(self._replicas.rank)
        if all(matrix.is_held_whole for matrix in self._matrices):
            return {number: parts[number] for number in own}
        nothing = parts[0].new_empty(0)
        sent = [torch.cat([nothing, *(parts[number] for number in self._owned_by(rank))]) for rank in range(axis.size)]
        sizes = [sum(self._matrices[number].ranges[rank][1] for number in own) for rank in range(axis.size)]
        received = exchange_parts(sent, sizes, axis)
        shards = {number: nothing.new_zeros(self._matrices[number].shard_numel) for number in own}
        for rank, values in enumerate(received):
            ranges = [self._matrices[number].ranges[rank] for number in own]
            for number, (first, count), part in zip(own, ranges, values.split([n for _, n in ranges]), strict=True):
                shards[number].narrow(0, first, count).copy_(part)
        return shards

    def _scatter(self, shards: Mapping[int, torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Sends every rank its ranges of the shards that this rank owns."""
        axis, nothing = self._replicas, parts[0].new_empty(0)
        sent = []
        for rank in range(axis.size):
            ranges = ((shard, *self._matrices[number].ranges[rank]) for number, shard in shards.items())
            sent.append(torch.cat([nothing, *(shard.narrow(0, first, count) for shard, first, count in ranges)]))
        owned = [self._owned_by(rank) for rank in range(axis.size)]
        received = exchange_parts(sent, [sum(len(parts[number]) for number in numbers) for numbers in owned], axis)
        for numbers, values in zip(owned, received, strict=True):
            sizes = [len(parts[number]) for number in numbers]
            for number, part in zip(numbers, values.split(sizes), strict=True):
                parts[number].copy_(part)

    def _join(
        self, numbers: list[int], shards: list[torch.Tensor], nothing: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The whole tensors that this rank owns, empty ones for the others, and the owners of all."""
        axis, matrices = self._tensor, [self._matrices[number] for number in numbers]
        if axis is None:
            pairs = zip(matrices, shards, strict=True)
            return [shard.clone().view(matrix.whole_shape) for matrix, shard in pairs], [0] * len(shards)
        owners = _owners(matrices, axis.size)
        mine = [place for place, owner in enumerate(owners) if owner == axis.rank]
        sent = [
            torch.cat([nothing, *(shards[place] for place, owner in enumerate(owners) if owner == rank)])
            for rank in range(axis.size)
        ]
        count = sum(matrices[place].shard_numel for place in mine)
        received = [
            values.split([matrices[place].shard_numel for place in mine])
            for values in exchange_parts(sent, [count] * axis.size, axis)
        ]
        wholes = [nothing] * len(shards)
        for position, place in enumerate(mine):
            shape, dimension = matrices[place].spec.local_shape, matrices[place].split_dimension or 0
            wholes[place] = torch.cat([values[position].view(shape) for values in received], dim=dimension)
        return wholes, owners

    def _divide(
        self, numbers: list[int], wholes: list[torch.Tensor], owners: list[int], nothing: torch.Tensor
    ) -> list[torch.Tensor]:
        """This rank's shards of the whole tensors that the owners hold."""
        axis, matrices = self._tensor, [self._matrices[number] for number in numbers]
        if axis is None:
            return [whole.view(-1) for whole in wholes]
        mine = [place for place, owner in enumerate(owners) if owner == axis.rank]
        chunks = [wholes[place].chunk(axis.size, dim=matrices[place].split_dimension or 0) for place in mine]
        sent = [torch.cat([nothing, *(each[rank].reshape(-1) for each in chunks)]) for rank in range(axis.size)]
        held = [[place for place, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)]
        sizes = [[matrices[place].shard_numel for place in places] for places in held]
        shards = [nothing] * len(wholes)
        received = exchange_parts(sent, [sum(each) for each in sizes], axis)
        for places, counts, values in zip(held, sizes, received, strict=True):
            for place, shard in zip(places, values.split(counts), strict=True):
                shards[place] = shard
        return shards


def _owners(matrices: Sequence[DividedMatrix], ranks: int) -> list[int]:
    """Who orthogonalises each matrix: the longest first, to the rank with the least to do."""
    loads, owners = [0] * ranks, [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda number: -matrices[number].cost):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += matrices[number].cost
    return owners


def _is_list(dimension: Dimension) -> bool:
    """Whether every entry of a dimension is a matrix of its own."""
    return len(dimension.parts) == dimension.size


def _boxes(whole: torch.Tensor, dimensions: Sequence[Dimension]) -> list[torch.Tensor]:
    """The parts of a tensor along all dimensions that join matrices; views."""
    boxes = [whole]
    for number, dimension in enumerate(dimensions):
        if dimension.parts:
            sizes = [1] * whole.shape[number] if _is_list(dimension) else list(dimension.parts)
            boxes = [part for box in boxes for part in box.split(sizes, dim=number)]
    return boxes

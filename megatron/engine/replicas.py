"""Detects replicas that differ between ranks.

Replicated norm layers of a tensor-parallel group stay equal only because all ranks compute the same; so do copies on
data-parallel ranks that ZeRO does not partition, and the word embeddings of the first and last stage. After a flipped
bit or because of a bug they diverge, although the loss looks normal, and a checkpoint holds the values of one rank.

Replicas are compared by digests, which change with any single bit: one all-reduce per group of ranks, and no values
unless digests differ. The digests of a tensor's parts sum to the digest of the whole, so replicas can be compared even
if ranks partition them differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.deepspeed_internals.parameters import is_whole, partition_of
from megatron.engine.engine import Engine
from megatron.engine.freezing import is_frozen
from megatron.engine.state import moments, part_of
from megatron.model.interface.step_state import states_of
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_gather_json, all_reduce_max, all_reduce_sum, broadcast
from megatron.parallel.pieces import Kind
from megatron.parallel.shard_spec import shard_spec_of

# Numbers of differing tensors per group of ranks that are compared by value, and described, largest difference first.
_COMPARED, _DESCRIBED = 64, 3

CHUNK = 1 << 18
# Digests keep 62 bits, so that their negatives are in range.
_KEPT = (1 << 62) - 1
_WEIGHT, _CHUNK_WEIGHT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # any odd numbers
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Replica:
    """Values that are replicated over an axis.

    Attributes:
        name: global name of the parameter.
        kind: the kind of values; "weight" is the network's weight.
        values: this rank's copy, or its part of a partitioned copy.
        first: offset of that part in the copy.
        divided_over: the axis that partitions each copy, not all of them alike; None for whole copies.
    """

    name: str
    kind: Kind
    values: torch.Tensor
    first: int = 0
    divided_over: Axis | None = None


@dataclass
class _Shared:
    """All values that are replicated over one axis."""

    axis: Axis
    replicas: list[Replica] = field(default_factory=list)
    digests: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    differing: list[int] = field(default_factory=list)


def find_differences(engine: Engine) -> list[str]:
    """Compares all replicated values; collective over the mesh.

    Returns:
        Descriptions of the differences, the same on every rank; empty if there are none.
    """
    digester = Digester()
    known: dict[tuple[str, Kind, int], torch.Tensor] = {}  # digests, reused for values replicated over several axes
    shared: dict[str, _Shared] = {}
    for axis, replica in replicas(engine):
        shared.setdefault(axis.name, _Shared(axis)).replicas.append(replica)
    # All ranks process the axes in the same order, to avoid deadlock.
    ordered = [copies for _, copies in sorted(shared.items())]
    for copies in ordered:
        copies.digests = _digests(copies, digester, known, engine.mesh.device)
        _compare(copies)
    control = engine.mesh.control
    differs = torch.tensor([any(copies.differing for copies in ordered)], dtype=torch.int64)
    if not int(all_reduce_max(differs, control)):
        return []
    texts = [text for copies in ordered for text in _describe_all(copies, engine.mesh.device)]
    return list(dict.fromkeys(text for entry in all_gather_json(texts, control) for text in entry))


def replicas(engine: Engine) -> Iterator[tuple[Axis, Replica]]:
    """Yields all replicated values with their axis, in the same order on all ranks of the axis."""
    mesh, tied = engine.mesh, {id(weight) for weight, _ in engine.tied}
    for parameter in engine.parameters():
        spec = shard_spec_of(parameter)
        data = spec.replicas(mesh)
        model = [axis for axis in mesh.axes_of("tensor") if axis.name not in spec.split_axes]
        ends = [mesh.embedding] if id(parameter) in tied else []
        for axis in (data, *model, *ends):
            if axis.size > 1:
                yield from ((axis, replica) for replica in _replicas_of(engine, parameter, axis, data))
    for state in states_of(engine.stack):
        for axis in (mesh.gradient, *mesh.axes_of("tensor")):
            if axis.size > 1:
                yield axis, Replica(state.global_name, "weight", state)  # type: ignore[attr-defined]


def _replicas_of(engine: Engine, parameter: nn.Parameter, axis: Axis, data: Axis) -> Iterator[Replica]:
    """The values of a parameter that are replicated over an axis: its weight, its moments unless ZeRO partitions them
    over that axis, and its fp32 weight if separate.
    """
    name: str = parameter.global_name  # type: ignore[attr-defined]
    partition, is_direct = partition_of(parameter), engine.view.is_direct
    if partition is not None and axis is not data:  # ZeRO-3
        yield Replica(name, "weight", partition)
    elif is_whole(parameter):
        yield Replica(name, "weight", parameter.data)
    if is_frozen(parameter) or (axis is data and not is_direct):
        return
    part = part_of(engine, parameter)
    # Two pipeline stages partition their copies differently.
    over = data if axis is engine.mesh.embedding and not is_direct else None
    if part is not None:
        masters: list[tuple[Kind, torch.Tensor]] = [] if is_direct else [("master", part.values)]
        yield from (Replica(name, kind, each, part.first, over) for kind, each in (*masters, *moments(engine, part)))
        return
    averages: tuple[Kind, ...] = ("average",) if engine.averages is not None and engine.averages.is_kept else ()
    kinds: tuple[Kind, ...] = ("master", *engine.plan.moments_of(parameter), *averages)
    yield from (Replica(name, kind, torch.empty(0, device=engine.mesh.device), 0, over) for kind in kinds)


def _digests(
    copies: _Shared, digester: Digester, known: dict[tuple[str, Kind, int], torch.Tensor], on_device: torch.device
) -> torch.Tensor:
    """The digests of the replicas, on the device of messages.

    Args:
        known: digests so far, by name, kind and address.
    """
    keys = [(each.name, each.kind, each.values.data_ptr()) for each in copies.replicas]
    for key, replica in zip(keys, copies.replicas, strict=True):
        if key not in known:
            known[key] = digester.digest(replica.values, replica.first).to(on_device)
    return torch.stack([known[key] for key in keys])


def _compare(copies: _Shared) -> None:
    """Finds the indices of the replicas whose digests differ; collective over the axis."""
    digests = copies.digests
    divided = [index for index, replica in enumerate(copies.replicas) if replica.divided_over is not None]
    if divided:
        digests[divided] = all_reduce_sum(digests[divided], copies.replicas[divided[0]].divided_over or copies.axis)
    copies.digests = comparable(digests)
    largest, negated_smallest = all_reduce_max(torch.stack([copies.digests, -copies.digests]), copies.axis)
    copies.differing = (largest != -negated_smallest).nonzero().flatten().tolist()


def _describe_all(copies: _Shared, on_device: torch.device) -> list[str]:
    """Describes the largest differences between the ranks of an axis, on its first rank; collective over the axis."""
    axis = copies.axis
    described = [
        _describe(copies.replicas[index], int(copies.digests[index]), axis, on_device)
        for index in copies.differing[:_COMPARED]
    ]
    # A difference spreads to other parameters within a step; the largest one is likely its origin.
    texts = [text for _, text in sorted(described, reverse=True, key=lambda entry: entry[0])[:_DESCRIBED]]
    left = len(copies.differing) - len(texts)
    if left > 0:
        texts.append(f"{left} more tensors differ between ranks {_listed(axis.ranks)}")
    return texts if axis.rank == 0 else []


def _describe(replica: Replica, digest: int, axis: Axis, on_device: torch.device) -> tuple[float, str]:
    """The relative difference of a replica, and its description; collective over the axis."""
    extents = all_gather_json([replica.first, replica.values.numel()], axis)
    is_comparable = replica.divided_over is None and all(extent == extents[0] for extent in extents)
    difference = _difference_to_first(replica.values, axis, on_device) if is_comparable else None
    rows = all_gather_json([digest, difference], axis)
    holders: dict[int, list[int]] = {}
    for rank, (held, _) in zip(axis.ranks, rows, strict=True):
        holders.setdefault(held, []).append(rank)
    shown = ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)} hold{'' if len(ranks) > 1 else 's'} {held:016x}"
        for held, ranks in holders.items()
    )
    text = f"{replica.name} ({replica.kind}): by digest, {shown}"
    for rank, (_, fields) in zip(axis.ranks, rows, strict=True):
        if fields is not None:
            gap = _Difference(*fields)
            return gap.ratio, (
                f"{text}; {gap.elements} of {replica.values.numel()} elements differ between rank {axis.ranks[0]} and "
                f"rank {rank}, the first at {gap.first}: {gap.reference} and {gap.value}"
            )
    return 0.0, text


class _Difference(NamedTuple):
    """The difference of a copy from the first rank's.

    Attributes:
        elements: number of elements that differ.
        first: index of the first of them.
        reference, value: the first rank's value there, and this rank's.
        ratio: the largest difference relative to the largest value; infinite if one is not finite.
    """

    elements: int
    first: int
    reference: str
    value: str
    ratio: float


def _difference_to_first(values: torch.Tensor, axis: Axis, on_device: torch.device) -> _Difference | None:
    """The difference of this rank's copy; None if it is equal; collective over the axis."""
    difference: _Difference | None = None
    for number, chunk in enumerate(values.detach().view(-1).split(CHUNK)):
        reference = broadcast(chunk.to(on_device, copy=True), axis).to(chunk.device)
        differs = (reference.view(torch.uint8) != chunk.view(torch.uint8)).view(len(chunk), -1).any(dim=1)
        if not (count := int(differs.sum())):
            continue
        gap = float((reference.double() - chunk.double()).abs().max() / reference.double().abs().max().clamp(min=1e-38))
        ratio = gap if math.isfinite(gap) else math.inf
        if difference is None:
            at = int(differs.nonzero()[0])
            difference = _Difference(0, number * CHUNK + at, repr(reference[at].item()), repr(chunk[at].item()), 0.0)
        difference = difference._replace(elements=difference.elements + count, ratio=max(difference.ratio, ratio))
    return difference


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Digester:
    """Computes digests, each on the device of its tensor, as optimizer state may be in host memory.

    A digest is the sum over elements, modulo 2^64, of an element's bits as an integer times an odd number that depends
    on its position. A change of a single bit always changes it; any other change almost always does.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def digest(self, values: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The digest of a tensor or a part of one; does not synchronize.

        Args:
            values: contiguous elements of at most four bytes.
            first: offset of the part in the whole tensor.

        Shapes: result `[]` int64, on the device of the values.
        """
        weights, all_products = self._on(values.device)
        bits = values.detach().view(-1).view(_INTEGERS[values.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        done = 0
        while done < len(bits):
            chunk, offset = divmod(first + done, CHUNK)
            count = min(CHUNK - offset, len(bits) - done)
            products = all_products[:count]
            torch.mul(bits[done : done + count], weights[offset : offset + count], out=products)
            total += products.sum() * _signed(pow(_CHUNK_WEIGHT, chunk + 1, 1 << 64))
            done += count
        return total

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of elements, and a buffer for products, on a device."""
        if device not in self._buffers:
            positions = torch.arange(CHUNK, dtype=torch.int64, device=device)
            mixed = (2 * positions + 1) * _signed(_WEIGHT)
            weights = (mixed ^ (mixed >> 31)) | 1  # not linear in the position, so that equal errors do not cancel
            self._buffers[device] = weights, torch.empty_like(weights)
        return self._buffers[device]


def comparable(digests: torch.Tensor) -> torch.Tensor:
    """Reduces sums of digests to non-negative numbers whose negatives are in range. Shapes: `[...]` int64."""
    return digests & _KEPT


def _signed(number: int) -> int:
    """An integer modulo 2^64, as an int64."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number

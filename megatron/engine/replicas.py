"""Finds values that should be the same on several ranks and are not.

Nothing keeps the copies of a norm on the ranks of a tensor-parallel group the same but that all of them compute the
same; the same holds for the data-parallel copies of everything that ZeRO does not divide, and for the copies of the
word embeddings on the first and the last stage. A flipped bit or a defect lets them drift apart, while the loss looks
as before, and a checkpoint holds one rank's values.

Copies are compared by digests: one all-reduce per group of ranks, and no values, unless digests differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.engine.digest import CHUNK, Digester, comparable
from megatron.engine.engine import Engine
from megatron.engine.freezing import is_frozen
from megatron.engine.pipeline import StageModule
from megatron.engine.state import moment_kinds, moments, slice_of, updates_weights_directly
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_gather_json, all_reduce_max, all_reduce_sum, broadcast
from megatron.parallel.pieces import Kind
from megatron.parallel.shard_spec import shard_spec_of

# Of the differing tensors of a group of ranks, so many are compared by value, and those that differ most described.
_COMPARED, _DESCRIBED = 64, 3


@dataclass(frozen=True)
class Replica:
    """Values of which all ranks of an axis hold a copy.

    Attributes:
        name: global name of the parameter.
        kind: what of the parameter it is; "weight" is what the network computes with.
        values: this rank's copy, or its part of a copy that is divided.
        first: position of that part in the copy.
        divided_over: the axis over whose ranks each copy is divided, not all of them alike; None for whole copies.
    """

    name: str
    kind: Kind
    values: torch.Tensor
    first: int = 0
    divided_over: Axis | None = None


@dataclass
class _Shared:
    """What the ranks of one axis hold copies of."""

    axis: Axis
    replicas: list[Replica] = field(default_factory=list)
    digests: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    differing: list[int] = field(default_factory=list)


def find_differences(engine: Engine) -> list[str]:
    """Compares all values of which several ranks hold copies; collective over the mesh.

    Returns:
        what differs between which ranks, the same on every rank; empty if nothing does.
    """
    digester = Digester(engine.mesh.device)
    known: dict[tuple[str, Kind, int], torch.Tensor] = {}  # of values that are compared over several axes
    shared: dict[str, _Shared] = {}
    for axis, replica in replicas(engine):
        shared.setdefault(axis.name, _Shared(axis)).replicas.append(replica)
    # All ranks take the axes in the same order, so that none waits for a rank that waits for it.
    for _, copies in sorted(shared.items()):
        _compare(copies, digester, known)
    control = engine.mesh.control
    differs = torch.tensor([any(copies.differing for copies in shared.values())], dtype=torch.int64)
    if not int(all_reduce_max(differs, control)):
        return []
    texts: list[str] = []
    for _, copies in sorted(shared.items()):
        texts += _describe_all(copies)
    return list(dict.fromkeys(text for entry in all_gather_json(texts, control) for text in entry))


def replicas(engine: Engine) -> Iterator[tuple[Axis, Replica]]:
    """Yields everything of which other ranks hold copies, with the axis over whose ranks they lie.

    On all ranks of an axis, its entries come in the same order.
    """
    tied = engine.module.tied_weights() if isinstance(engine.module, StageModule) else []
    tied_ids = set(map(id, tied))
    for parameter in engine.parameters():
        spec, mesh = shard_spec_of(parameter), engine.mesh
        data = mesh.expert_gradient if mesh.ep.name in spec.split_axes else mesh.gradient
        model = [axis for axis in mesh.axes_of("tensor") if axis.name not in spec.split_axes]
        ends = [mesh.embedding] if id(parameter) in tied_ids else []
        for axis in (data, *model, *ends):
            if axis.size > 1:
                for replica in _replicas_of(engine, parameter, axis, data):
                    yield axis, replica


def _replicas_of(engine: Engine, parameter: nn.Parameter, axis: Axis, data: Axis) -> Iterator[Replica]:
    """What of a parameter the ranks of an axis hold copies of."""
    name: str = parameter.global_name  # type: ignore[attr-defined]
    is_partitioned = hasattr(parameter, "ds_tensor")  # ZeRO-3
    if is_partitioned and axis is not data:
        yield Replica(name, "weight", parameter.ds_tensor.data)  # type: ignore[attr-defined]
    elif not is_partitioned or parameter.ds_status.name == "AVAILABLE":  # type: ignore[attr-defined]
        yield Replica(name, "weight", parameter.data)
    if is_frozen(parameter):
        return
    if updates_weights_directly(engine):
        part = slice_of(engine, parameter)
        if part is not None:
            yield from (Replica(name, kind, values) for kind, values in moments(engine, part))
    elif axis is not data:
        yield from _divided_replicas(engine, parameter, data if axis is engine.mesh.embedding else None)


def _divided_replicas(engine: Engine, parameter: nn.Parameter, divided_over: Axis | None) -> Iterator[Replica]:
    """The part of master weight and moments that this rank holds; empty where it holds none.

    Args:
        divided_over: as in `Replica`: the ranks of two pipeline stages divide their copies differently.
    """
    name: str = parameter.global_name  # type: ignore[attr-defined]
    part = slice_of(engine, parameter)
    if part is not None:
        yield Replica(name, "master", part.values, part.first, divided_over)
        yield from (Replica(name, kind, values, part.first, divided_over) for kind, values in moments(engine, part))
    else:
        nothing = torch.empty(0, device=engine.mesh.device)
        yield from (Replica(name, kind, nothing, 0, divided_over) for kind in ("master", *moment_kinds(engine)))


def _compare(copies: _Shared, digester: Digester, known: dict[tuple[str, Kind, int], torch.Tensor]) -> None:
    """Finds the places of the replicas whose digests differ; collective over the axis.

    Args:
        known: the digests of values that were compared before, by name, kind and place in memory.
    """
    computed = []
    for replica in copies.replicas:
        key = replica.name, replica.kind, replica.values.data_ptr()
        if key not in known:
            known[key] = digester.digest(replica.values, replica.first)
        computed.append(known[key])
    digests = torch.stack(computed)
    divided = [place for place, replica in enumerate(copies.replicas) if replica.divided_over is not None]
    if divided:
        digests[divided] = all_reduce_sum(digests[divided], copies.replicas[divided[0]].divided_over or copies.axis)
    copies.digests = comparable(digests)
    largest, negated_smallest = all_reduce_max(torch.stack([copies.digests, -copies.digests]), copies.axis)
    copies.differing = (largest != -negated_smallest).nonzero().flatten().tolist()


def _describe_all(copies: _Shared) -> list[str]:
    """What differs most between the ranks of an axis, told by the first of them; collective over the axis.

    A difference spreads to other parameters within a step, so the one that differs most is likely where it began.
    """
    texts = []
    for place in copies.differing[:_COMPARED]:
        texts.append(_describe(copies.replicas[place], int(copies.digests[place]), copies.axis))
    texts = sorted(texts, reverse=True, key=lambda entry: entry[0])[:_DESCRIBED]
    told = [text for _, text in texts]
    left = len(copies.differing) - len(told)
    if left > 0:
        told.append(f"{left} more tensors differ between ranks {_listed(copies.axis.ranks)}")
    return told if copies.axis.rank == 0 else []


def _describe(replica: Replica, digest: int, axis: Axis) -> tuple[float, str]:
    """How much the copies of one replica differ, and who holds what; collective over the axis."""
    difference = _difference_to_first(replica.values, axis) if replica.divided_over is None else None
    rows = all_gather_json([digest, None if difference is None else dataclasses.astuple(difference)], axis)
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
            found = _Difference(*fields)
            return found.ratio, (
                f"{text}; {found.count} of {replica.values.numel()} elements differ between rank {axis.ranks[0]} and "
                f"rank {rank}, the first at {found.place}: {found.first_value} and {found.own_value}"
            )
    return 0.0, text


@dataclass(frozen=True)
class _Difference:
    """How a copy differs from that of the first rank of the axis: the number of elements, and one of them.

    Attributes:
        ratio: the largest difference of an element, in times of the largest value; infinite if one is not finite.
    """

    count: int
    place: int
    first_value: str
    own_value: str
    ratio: float


def _difference_to_first(values: torch.Tensor, axis: Axis) -> _Difference | None:
    """The difference of this rank's copy, None if there is none; collective over the axis."""
    found: _Difference | None = None
    for number, chunk in enumerate(values.detach().view(-1).split(CHUNK)):
        reference = broadcast(chunk.clone(), axis)
        differs = (reference.view(torch.uint8) != chunk.view(torch.uint8)).view(len(chunk), -1).any(dim=1)
        count = int(differs.sum())
        if not count:
            continue
        gap = float((reference.double() - chunk.double()).abs().max() / reference.double().abs().max().clamp(min=1e-38))
        ratio = gap if math.isfinite(gap) else math.inf
        if found is None:
            first = int(differs.nonzero()[0])
            shown = repr(reference[first].item()), repr(chunk[first].item())
            found = _Difference(0, number * CHUNK + first, *shown, ratio)
        found = dataclasses.replace(found, count=found.count + count, ratio=max(found.ratio, ratio))
    return found


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

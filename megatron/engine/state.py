"""The weights and optimizer moments inside DeepSpeed, as named pieces.

`held_parts` yields, for every local parameter, the flat range that this rank holds and its values: for a trained
parameter the fp32 master weight and moments in DeepSpeed's optimizer, for a frozen one the network's weight. Saving and
loading build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from megatron.engine.deepspeed_internals.parameters import partition_of, whole_numel
from megatron.engine.engine import Engine
from megatron.engine.freezing import is_frozen
from megatron.engine.tensor_parts import MasterSlice
from megatron.kernels.optimizer import moment
from megatron.model.interface.step_state import states_of
from megatron.parallel.pieces import Kind, PieceKey, filling
from megatron.parallel.shard_spec import ShardSpec, shard_spec_of


@dataclass(frozen=True)
class HeldPart:
    """The part of one parameter, or of a module's state, that this rank holds.

    Attributes:
        name: global name of the parameter.
        spec: the sharding of the parameter.
        first: flat row-major offset of the part in the local tensor.
        values: the part's weight, 1-D; for a trained parameter in fp32, a view into the optimizer.
        is_counted: among the ranks that hold the part, this rank writes it to a checkpoint.
        is_shared: all data-parallel ranks with the parameter hold the part, so they divide the writing.
        master: the part in the optimizer; None for a frozen parameter, or state.
        is_optional: it keeps its values if a checkpoint lacks it.
        moment_names: the moments of a trained parameter, and their names in the state of the torch optimizer.
        has_average: an average of its values is kept.
    """

    name: str
    spec: ShardSpec
    first: int
    values: torch.Tensor
    is_counted: bool
    is_shared: bool
    master: MasterSlice | None
    is_optional: bool = False
    moment_names: Mapping[Kind, str] = field(default_factory=dict)
    has_average: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (*self.moment_names, *(("average",) if self.has_average else ()))

    @cached_property
    def numel(self) -> int:
        """Number of elements of the part without vocabulary padding."""
        return max(0, min(self.values.numel(), self.spec.box_numel - self.first))

    def key(self, kind: Kind) -> PieceKey:
        """The layout-free description of the part."""
        last = self.first + self.numel
        return PieceKey.of(self.spec, self.name, kind, self.first, last, is_optional=self.is_optional)


def owned_pieces(engine: Engine, *, with_optimizer: bool = True) -> Iterator[tuple[PieceKey, torch.Tensor]]:
    """Yields the pieces that this rank writes; over all ranks, each element of a parameter or moment occurs once."""
    for part, first, last in _owned_parts(engine):
        key = part.key("weight").narrowed(first, last)
        for kind, tensor in _tensors(engine, part, with_optimizer):
            yield key.of_kind(kind), tensor[first:last].detach()
        averages = engine.averages
        if averages is not None and not averages.is_kept and part.master is not None:
            yield key.of_kind("average"), averages.of(part.master.flat, part.master.offset + first, last - first)


def owned_bytes(engine: Engine, *, with_optimizer: bool = True) -> int:
    """The size of the values of `owned_pieces` in bytes; does not create moments."""
    return sum(
        (last - first) * part.values.element_size() * (1 + sum(_is_kept(kind, with_optimizer) for kind in part.kinds))
        for part, first, last in _owned_parts(engine)
    )


def _owned_parts(engine: Engine) -> Iterator[tuple[HeldPart, int, int]]:
    """The parts that this rank writes, with the range of elements of each."""
    for part in held_parts(engine):
        if not part.is_counted or part.numel == 0:
            continue
        first, last = 0, part.numel
        if part.is_shared:
            replicas = part.spec.replicas(engine.mesh)
            rank, size = replicas.rank, replicas.size
            length = -(-part.numel // size)  # equal parts, as under ZeRO-3, so a checkpoint describes them in one row
            first, last = rank * length, min((rank + 1) * length, part.numel)
        if first < last:
            yield part, first, last


def pieces_to_load(
    engine: Engine, *, with_optimizer: bool = True, starts_from_averages: bool = False
) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """Yields the pieces that this rank reads, each with a function that copies a loaded tensor to its destination.

    Call `refresh_weights` after the last one.

    Args:
        starts_from_averages: initialize the weights with averaged weights, if the checkpoint has any; only without
            the optimizer's state.
    """
    return filling(
        (part.key("average" if starts_from_averages else kind), tensor[: part.numel])
        for part in held_parts(engine)
        if part.numel
        for kind, tensor in _tensors(engine, part, with_optimizer and part.name not in engine.freezing.thawed)
    )


@torch.no_grad()
def refresh_weights(
    engine: Engine, update_count: int | None, *, averaging_weight: float = 0.0, restarts_averages: bool = False
) -> None:
    """Copies the loaded master weights to the model's weights and sets the optimizer's update counter.

    Args:
        engine: the engine whose `pieces_to_load` were loaded.
        update_count: number of optimizer updates of the loaded moments, for bias correction; None if only weights were
            loaded, which resets the optimizer.
        averaging_weight: see `Engine.averaging_weight`.
        restarts_averages: restart the averages from the weights, whatever was loaded; a checkpoint without averages has
            loaded its weights for them.
    """
    engine.restart_count(update_count or 0, averaging_weight)
    freezing = engine.freezing = engine.freezing.as_of(engine.update_count, averaging_weight)
    for part in held_parts(engine):
        if part.master is not None:
            updates = engine.update_count - freezing.began_at.get(part.name, 0)
            weight = averaging_weight - freezing.averaged_from.get(part.name, 0.0)
            engine.plan.resume(engine.optimizer, part.master.flat, updates, weight)
    if restarts_averages and engine.averages is not None:
        engine.averages.restart()
    engine.view.refresh_weights()


def held_parts(engine: Engine) -> Iterator[HeldPart]:
    """Yields the parts of the local parameters in a fixed order, including frozen ones, and the state of modules."""
    yield from (part for parameter in engine.parameters() if (part := part_of(engine, parameter)) is not None)
    for state in states_of(engine.stack):
        spec, name = shard_spec_of(state), state.global_name  # type: ignore[attr-defined]
        is_optional: bool = state.is_optional  # type: ignore[attr-defined]
        yield HeldPart(name, spec, 0, state.view(-1), spec.is_counted(engine.mesh), True, None, is_optional)


def part_of(engine: Engine, parameter: nn.Parameter) -> HeldPart | None:
    """The part of a local parameter that this rank holds: the part it updates, or for a frozen parameter its ZeRO-3
    partition or the whole; None if it holds nothing.
    """
    spec, mesh, partition = shard_spec_of(parameter), engine.mesh, partition_of(parameter)
    master = None if is_frozen(parameter) else engine.view.slice_of(parameter)
    if master is not None:
        first, values, is_shared = master.first, master.values, engine.view.is_direct
    elif not is_frozen(parameter):
        return None
    elif partition is None:
        first, values, is_shared = 0, parameter.data.view(-1), True
    else:
        first, is_shared = spec.replicas(mesh).rank * partition.numel(), False
        values = partition[: max(0, whole_numel(parameter) - first)]
    name: str = parameter.global_name  # type: ignore[attr-defined]
    names = {} if master is None else engine.plan.moments_of(parameter)
    has_average = master is not None and engine.averages is not None
    is_counted = spec.is_counted(mesh)
    return HeldPart(name, spec, first, values, is_counted, is_shared, master, False, names, has_average)


def moments(engine: Engine, part: HeldPart) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The moments of a trained part, and the average of its weights if kept; creates missing moments as zeros."""
    if part.master is None:
        return
    flat, offset = part.master.flat, part.master.offset
    state = engine.optimizer.state[flat]
    if "exp_avg_sq" in part.moment_names and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
    for kind, name in part.moment_names.items():
        yield kind, moment(engine.optimizer, flat, name).view(-1).narrow(0, offset, part.values.numel())
    if engine.averages is not None and engine.averages.is_kept:
        yield "average", engine.averages.of(flat, offset, part.values.numel())


def _tensors(engine: Engine, part: HeldPart, with_optimizer: bool) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The weight or master weight of a part, then its moments."""
    is_master = part.master is not None and engine.steps.dtype is not torch.float32
    yield "master" if is_master else "weight", part.values
    yield from ((kind, tensor) for kind, tensor in moments(engine, part) if _is_kept(kind, with_optimizer))


def _is_kept(kind: Kind, with_optimizer: bool) -> bool:
    """True if this kind is saved and loaded with the weight, as averages are even without the optimizer."""
    return with_optimizer or kind == "average"

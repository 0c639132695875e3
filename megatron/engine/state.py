"""The weights and optimizer moments inside DeepSpeed, as named pieces.

`held_parts` finds for every local parameter which flat range of it this rank holds and where its values are: of a
trained one the fp32 master weight and the moments, for every optimizer that DeepSpeed may return; of a frozen one the
weight that the network computes with. Saving and loading both build on it. The base optimizer's state is accessed
directly, so nothing depends on DeepSpeed's linking of fragments, which covers only the first parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron.engine.engine import Engine
from megatron.engine.freezing import is_frozen
from megatron.kernels.optimizer import count_updates, moment
from megatron.parallel.pieces import Kind, PieceKey, filling
from megatron.parallel.shard_spec import ShardSpec, shard_spec_of

# Name of each stored moment in the state of the torch optimizer.
_MOMENTS: dict[str, dict[Kind, str]] = {
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"exp_avg": "momentum_buffer"},
}


@dataclass(frozen=True)
class HeldPart:
    """The part of one parameter whose values this rank holds.

    Attributes:
        name: global name of the parameter.
        spec: the position of the local tensor in the global one.
        first: flat row-major offset of the part in the local tensor.
        values: the part's weight, 1-D; of a trained parameter in fp32, a view into the optimizer.
        is_counted: whether this rank, among those that hold the part, writes it to a checkpoint.
        is_shared: whether every data-parallel rank holds the part, so that they divide the writing.
    """

    name: str
    spec: ShardSpec
    first: int
    values: torch.Tensor
    is_counted: bool
    is_shared: bool

    @cached_property
    def numel(self) -> int:
        """Number of elements of the part without vocabulary padding."""
        return max(0, min(self.values.numel(), self.spec.box_numel - self.first))

    def key(self, kind: Kind) -> PieceKey:
        """The layout-free description of the part."""
        return PieceKey.of(self.spec, self.name, kind, self.first, self.first + self.numel)


@dataclass(frozen=True)
class OptimizerSlice(HeldPart):
    """The part of one parameter that this rank updates.

    Attributes:
        flat: the tensor that the torch optimizer updates; the key of its state.
        offset: offset of the part in `flat`.
    """

    flat: torch.Tensor
    offset: int


def owned_pieces(engine: Engine, *, with_optimizer: bool = True) -> Iterator[tuple[PieceKey, torch.Tensor]]:
    """Yields the pieces that this rank must write; over all ranks, every element of every parameter and moment appears
    exactly once.
    """
    for part, first, last in _owned_parts(engine):
        key = part.key("weight").narrowed(first, last)
        for kind, tensor in _tensors(engine, part, with_optimizer):
            yield key.of_kind(kind), tensor[first:last].detach()


def owned_bytes(engine: Engine, *, with_optimizer: bool = True) -> int:
    """How many bytes the values of `owned_pieces` take; known before any moment exists."""
    moment_count = len(moment_kinds(engine)) if with_optimizer else 0
    return sum(
        (last - first) * part.values.element_size() * (1 + (moment_count if isinstance(part, OptimizerSlice) else 0))
        for part, first, last in _owned_parts(engine)
    )


def _owned_parts(engine: Engine) -> Iterator[tuple[HeldPart, int, int]]:
    """The parts that this rank writes, and which elements of each."""
    for part in held_parts(engine):
        if not part.is_counted or part.numel == 0:
            continue
        first, last = 0, part.numel
        if part.is_shared:
            first, last = _share(part.numel, engine.mesh.gradient.rank, engine.mesh.gradient.size)
        if first < last:
            yield part, first, last


def wanted_pieces(
    engine: Engine, *, with_optimizer: bool = True
) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """Yields the pieces that this rank must read, each with a function that copies the loaded tensor into place.

    Call `refresh_weights` after the last one.
    """
    return filling(
        (part.key(kind), tensor[: part.numel])
        for part in held_parts(engine)
        if part.numel
        for kind, tensor in _tensors(engine, part, with_optimizer and part.name not in engine.freezing.thawed)
    )


@torch.no_grad()
def refresh_weights(engine: Engine, update_count: int | None) -> None:
    """Copies the loaded master weights to the model's weights and sets the optimizer's update counter.

    Args:
        engine: the engine whose `wanted_pieces` were loaded.
        update_count: number of optimizer updates behind the loaded moments (bias correction depends on it); None if
            only weights were loaded, which resets the optimizer.
    """
    engine.update_count = update_count or 0
    engine.freezing = engine.freezing.as_of(engine.update_count)
    for part in optimizer_slices(engine):
        count_updates(engine.optimizer, part.flat, engine.update_count - engine.freezing.began_at.get(part.name, 0))
    wrapper = engine.deepspeed.optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        _refresh_stage_three(wrapper)
    elif hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()


def held_parts(engine: Engine) -> Iterator[HeldPart]:
    """Yields the parts of the local parameters in a fixed order, those of frozen ones included."""
    for parameter in engine.parameters():
        part = _frozen_part(engine, parameter) if is_frozen(parameter) else slice_of(engine, parameter)
        if part is not None:
            yield part


def optimizer_slices(engine: Engine) -> Iterator[OptimizerSlice]:
    """Yields the slices of the local parameters in a fixed order."""
    return (part for parameter in engine.parameters() if (part := slice_of(engine, parameter)) is not None)


def slice_of(engine: Engine, parameter: nn.Parameter) -> OptimizerSlice | None:
    """The slice of a local parameter; None if this rank updates nothing of it."""
    if is_frozen(parameter):
        return None
    wrapper = engine.deepspeed.optimizer
    found: tuple[int, torch.Tensor, torch.Tensor, int] | None
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        found = _stage_three_slice(engine, wrapper, parameter)
    elif updates_weights_directly(engine):
        found = (0, parameter.data.view(-1), parameter, 0)
    else:
        found = _partitioned_slice(engine, parameter)
    if found is None:
        return None
    first, values, flat, offset = found
    return OptimizerSlice(
        **_place(engine, parameter),
        first=first,
        values=values,
        is_shared=updates_weights_directly(engine),
        flat=flat,
        offset=offset,
    )


def _frozen_part(engine: Engine, parameter: nn.Parameter) -> HeldPart | None:
    """What this rank holds of a frozen parameter: its partition under ZeRO-3, else all of it."""
    if not hasattr(parameter, "ds_tensor"):
        return HeldPart(**_place(engine, parameter), first=0, values=parameter.data.view(-1), is_shared=True)
    partition = parameter.ds_tensor.data.view(-1)
    first = engine.mesh.gradient.rank * partition.numel()
    held = max(0, min(partition.numel(), parameter.ds_numel - first))  # type: ignore[attr-defined]
    if not held:
        return None
    return HeldPart(**_place(engine, parameter), first=first, values=partition[:held], is_shared=False)


def _place(engine: Engine, parameter: nn.Parameter) -> dict[str, Any]:
    """Which parameter it is, and whether this rank accounts for it."""
    spec = shard_spec_of(parameter)
    return {
        "name": parameter.global_name,  # type: ignore[attr-defined]
        "spec": spec,
        "is_counted": spec.is_counted(engine.mesh),
    }


def updates_weights_directly(engine: Engine) -> bool:
    """Whether the optimizer updates the network's own weights, all of them on every data-parallel rank (ZeRO 0)."""
    return engine.deepspeed.optimizer is engine.optimizer


def moment_kinds(engine: Engine) -> tuple[Kind, ...]:
    """The moments that the optimizer keeps."""
    return tuple(_MOMENTS[engine.optim.optimizer])


def moments(engine: Engine, part: OptimizerSlice) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The moments of a slice; missing ones are created as zeros."""
    state = engine.optimizer.state[part.flat]
    length = part.values.numel()
    if engine.optim.optimizer == "adam" and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.flat.device)
    for kind, name in _MOMENTS[engine.optim.optimizer].items():
        yield kind, moment(engine.optimizer, part.flat, name).view(-1).narrow(0, part.offset, length)


def _partitioned_slice(engine: Engine, parameter: nn.Parameter) -> tuple[int, torch.Tensor, torch.Tensor, int] | None:
    """ZeRO-1/2 and the BF16 optimizer: one flat fp32 partition per parameter group, split over the data-parallel
    ranks.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    flat = engine.optimizer.param_groups[mapping.param_group_index]["params"][0]
    address = mapping.hp_fragment_address
    master = flat.data.narrow(0, address.start, address.numel)
    return mapping.lp_fragment_address.start, master, flat, address.start


def _stage_three_slice(
    engine: Engine, wrapper: object, parameter: nn.Parameter
) -> tuple[int, torch.Tensor, torch.Tensor, int] | None:
    """ZeRO-3: every parameter is split into equal, padded parts; sub-groups hold the fp32 parts consecutively."""
    group, offset, length = wrapper.grad_position[wrapper.get_param_id(parameter)]  # type: ignore[attr-defined]
    flat = wrapper.fp32_partitioned_groups_flat[group]  # type: ignore[attr-defined]
    first = engine.mesh.gradient.rank * length
    held = max(0, min(length, parameter.ds_numel - first))  # type: ignore[attr-defined]
    return (first, flat.data.narrow(0, offset, held), flat, offset) if held else None


def _refresh_stage_three(wrapper: object) -> None:
    """Copies the fp32 parts into the model's partitions and into the persistent parameters, which every rank keeps
    whole.
    """
    for group, flat in enumerate(wrapper.fp32_partitioned_groups_flat):  # type: ignore[attr-defined]
        for parameter in wrapper.fp16_groups[group]:  # type: ignore[attr-defined]
            _, offset, length = wrapper.grad_position[wrapper.get_param_id(parameter)]  # type: ignore[attr-defined]
            parameter.ds_tensor.data.copy_(flat.data.narrow(0, offset, length))
    persistent = wrapper.persistent_parameters  # type: ignore[attr-defined]
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def _tensors(engine: Engine, part: HeldPart, with_optimizer: bool) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The weight or master weight of a part, then its moments."""
    is_trained = isinstance(part, OptimizerSlice)
    yield "master" if is_trained and engine.precision.dtype_name != "float32" else "weight", part.values
    if with_optimizer and isinstance(part, OptimizerSlice):
        yield from moments(engine, part)


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size

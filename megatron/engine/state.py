"""The fp32 weights and optimizer moments inside DeepSpeed, as named pieces.

`optimizer_slices` finds for every local parameter which flat range of it this rank holds and where its master weight
and moments are, for every optimizer that DeepSpeed may return; saving and loading both build on it. The base
optimizer's state is accessed directly, so nothing depends on DeepSpeed's linking of fragments, which covers only the
first parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megatron.engine.engine import Engine
from megatron.parallel.pieces import Kind, PieceKey, filling
from megatron.parallel.shard_spec import ShardSpec, shard_spec_of

# Name of each stored moment in the state of the torch optimizer.
_MOMENTS: dict[str, dict[Kind, str]] = {
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"exp_avg": "momentum_buffer"},
}


@dataclass(frozen=True)
class OptimizerSlice:
    """The part of one parameter that this rank updates.

    Attributes:
        name: global name of the parameter.
        spec: the position of the local tensor in the global one.
        first: flat row-major offset of the part in the local tensor.
        master: the part's fp32 weight, 1-D, a view into the optimizer.
        flat: the tensor that the torch optimizer updates; the key of its state.
        offset: offset of the part in `flat`.
        is_counted: whether this rank, among those that hold the part, writes it to a checkpoint.
    """

    name: str
    spec: ShardSpec
    first: int
    master: torch.Tensor
    flat: torch.Tensor
    offset: int
    is_counted: bool

    @cached_property
    def numel(self) -> int:
        """Number of elements of the part without vocabulary padding."""
        return max(0, min(self.master.numel(), self.spec.box_numel - self.first))

    def key(self, kind: Kind) -> PieceKey:
        """The layout-free description of the part."""
        return PieceKey.of(self.spec, self.name, kind, self.first, self.first + self.numel)


def owned_pieces(engine: Engine, *, with_optimizer: bool = True) -> Iterator[tuple[PieceKey, torch.Tensor]]:
    """Yields the pieces that this rank must write; over all ranks, every element of every parameter and moment appears
    exactly once.
    """
    for part, first, last in _owned_slices(engine):
        key = part.key("weight").narrowed(first, last)
        for kind, tensor in _tensors(engine, part, with_optimizer):
            yield key.of_kind(kind), tensor[first:last].detach()


def owned_bytes(engine: Engine, *, with_optimizer: bool = True) -> int:
    """How many bytes the values of `owned_pieces` take; known before any moment exists."""
    kinds = 1 + (len(_MOMENTS[engine.optim.optimizer]) if with_optimizer else 0)
    return sum((last - first) * kinds * part.master.element_size() for part, first, last in _owned_slices(engine))


def _owned_slices(engine: Engine) -> Iterator[tuple[OptimizerSlice, int, int]]:
    """The slices that this rank writes, and which elements of each."""
    for part in optimizer_slices(engine):
        if not part.is_counted or part.numel == 0:
            continue
        first, last = 0, part.numel
        if updates_weights_directly(engine):
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
        for part in optimizer_slices(engine)
        if part.numel
        for kind, tensor in _tensors(engine, part, with_optimizer)
    )


@torch.no_grad()
def refresh_weights(engine: Engine, update_count: int | None) -> None:
    """Copies the loaded master weights to the model's weights and sets the optimizer's update counter.

    Args:
        engine: the engine whose `wanted_pieces` were loaded.
        update_count: number of optimizer updates behind the loaded moments (bias correction depends on it); None if
            only weights were loaded, which resets the optimizer.
    """
    for state in engine.optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].fill_(float(update_count or 0))
    wrapper = engine.deepspeed.optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        _refresh_stage_three(wrapper)
    elif hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()


def optimizer_slices(engine: Engine) -> Iterator[OptimizerSlice]:
    """Yields the slices of the local parameters in a fixed order."""
    return (part for parameter in engine.module.parameters() if (part := slice_of(engine, parameter)) is not None)


def slice_of(engine: Engine, parameter: nn.Parameter) -> OptimizerSlice | None:
    """The slice of a local parameter; None if this rank updates nothing of it."""
    wrapper = engine.deepspeed.optimizer
    spec = shard_spec_of(parameter)
    found: tuple[int, torch.Tensor, torch.Tensor, int] | None
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        found = _stage_three_slice(engine, wrapper, parameter)
    elif updates_weights_directly(engine):
        found = (0, parameter.data.view(-1), parameter, 0)
    else:
        found = _partitioned_slice(engine, parameter)
    if found is None:
        return None
    name: str = parameter.global_name  # type: ignore[attr-defined]
    return OptimizerSlice(name, spec, *found, is_counted=spec.is_counted(engine.mesh))


def updates_weights_directly(engine: Engine) -> bool:
    """Whether the optimizer updates the network's own weights, all of them on every data-parallel rank (ZeRO 0)."""
    return engine.deepspeed.optimizer is engine.optimizer


def moment_kinds(engine: Engine) -> tuple[Kind, ...]:
    """The moments that the optimizer keeps."""
    return tuple(_MOMENTS[engine.optim.optimizer])


def moments(engine: Engine, part: OptimizerSlice) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The moments of a slice; missing ones are created as zeros."""
    state = engine.optimizer.state[part.flat]
    length = part.master.numel()
    if engine.optim.optimizer == "adam" and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.flat.device)
    for kind, name in _MOMENTS[engine.optim.optimizer].items():
        if state.get(name) is None:
            state[name] = torch.zeros_like(part.flat)
        yield kind, state[name].view(-1).narrow(0, part.offset, length)


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


def _tensors(engine: Engine, part: OptimizerSlice, with_optimizer: bool) -> Iterator[tuple[Kind, torch.Tensor]]:
    """The weight or master weight of a slice, then its moments."""
    yield "weight" if engine.precision.dtype_name == "float32" else "master", part.master
    if with_optimizer:
        yield from moments(engine, part)


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size

"""Muon: momentum, orthogonalized for each whole matrix, although its parts may be on several ranks.

Source: K. Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config.sections.optimizers import OptimizerFields
from megatron.engine.optimizers.adam import adamw
from megatron.engine.optimizers.orthogonalization import SCALES, orthogonalized
from megatron.engine.optimizers.plan import ADAMS_MOMENTS, MOMENTUM, OptimizerPlan
from megatron.engine.optimizers.whole_matrices import DividedMatrix, WholeMatrices
from megatron.engine.tensor_parts import SliceOf, is_block_matrix
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import can_skip, gradients_unless_skipped, unless_skipped, update
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.messages import all_gather_json
from megatron.parallel.pieces import Kind
from megatron.parallel.shard_spec import shard_spec_of

# Marks a parameter group whose matrices are orthogonalized.
_IS_ORTHOGONAL = "is_orthogonal"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HeldMatrix(NamedTuple):
    """A matrix, and this rank's part, from `offset` in a tensor of the optimizer; `flat` is None without a part."""

    matrix: DividedMatrix
    flat: torch.Tensor | None
    offset: int


def held_matrices(trained: Sequence[nn.Parameter], slice_of: SliceOf, mesh: ParallelMesh) -> list[HeldMatrix]:
    """The matrices of blocks, with this rank's parts; collective over the ranks that hold copies of a shard."""
    matrices = [parameter for parameter in trained if is_block_matrix(parameter)]
    slices = [slice_of(parameter) for parameter in matrices]
    by_axis: dict[tuple[int, ...], tuple[Axis, list[int]]] = {}
    for number, parameter in enumerate(matrices):
        axis = shard_spec_of(parameter).replicas(mesh)
        by_axis.setdefault(axis.ranks, (axis, []))[1].append(number)
    held: dict[int, HeldMatrix] = {}
    for axis, numbers in by_axis.values():
        local = [(0, 0) if (each := slices[number]) is None else (each.first, len(each.values)) for number in numbers]
        for number, *ranges in zip(numbers, *all_gather_json(local, axis), strict=True):
            part = slices[number]
            matrix = DividedMatrix(shard_spec_of(matrices[number]), axis, tuple((first, n) for first, n in ranges))
            held[number] = HeldMatrix(matrix, None, 0) if part is None else HeldMatrix(matrix, part.flat, part.offset)
    return [held[number] for number in range(len(matrices))]


class Muon(torch.optim.Optimizer):
    """Muon for groups with `is_orthogonal`, and another optimizer for the rest.

    The tensors of its groups may be flat and hold ranges of many matrices, which `connect` describes; steps before
    that do nothing. A step is skipped if `found_inf` is set, as by `torch.amp.GradScaler`, and not 0.

    Args:
        groups: of all parameters.
        others: the optimizer of all other groups, built from the same dictionaries; None if there are none.
        optim: the constants of Muon.
    """

    def __init__(
        self, groups: list[dict[str, Any]], others: torch.optim.Optimizer | None, lr: float, optim: OptimizerFields
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._others = others
        self._optim = optim
        self._held: Sequence[HeldMatrix] = ()
        self._buckets: list[tuple[list[int], WholeMatrices]] = []
        self._is_connected = False
        if others is not None:
            others.state = self.state

    @property
    def can_skip(self) -> bool:
        return self._others is None or can_skip(self._others)

    def connect(self, held: Sequence[HeldMatrix]) -> None:
        """Sets the matrices that this rank, or another one with the same layers, updates.

        All ranks that divide a matrix must pass the same matrices in the same order.
        """
        self._held = held
        self._buckets = WholeMatrices.buckets([each.matrix for each in held]) if held else []
        self._is_connected = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; collective over the ranks that divide matrices."""
        if not self._is_connected:
            return
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        tensors = [tensor for group in self.param_groups for tensor in _tensors_of(group)]
        directions = {id(tensor): self._direction(tensor, skip) for tensor in tensors}
        parts = [self._part(each, directions) for each in self._held]
        for numbers, whole in self._buckets:
            whole.transform([parts[number] for number in numbers], self._orthogonalize)
        for group in self.param_groups:
            decay = unless_skipped(skip, 1.0 - group["lr"] * group["weight_decay"], 1.0)
            rate = unless_skipped(skip, group["lr"], 0.0)
            for tensor in _tensors_of(group):
                tensor.mul_(decay).sub_(directions[id(tensor)].view_as(tensor).mul_(rate))
        if self._others is not None:
            update(self._others, skip=skip)

    def _part(self, held: HeldMatrix, directions: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The direction of this rank's part of a matrix; zeros without a gradient."""
        direction, count = directions.get(id(held.flat)), held.matrix.ranges[held.matrix.replicas.rank][1]
        if direction is None:
            like = next(tensor for group in self.param_groups for tensor in group["params"])
            return like.new_zeros(count)
        return direction.view(-1).narrow(0, held.offset, count)

    def _direction(self, tensor: torch.Tensor, skip: torch.Tensor | None) -> torch.Tensor:
        """Updates the momentum; returns the direction as a new tensor."""
        state, momentum = self.state[tensor], self._optim.muon_momentum
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        buffer: torch.Tensor = state["momentum_buffer"]
        [gradient] = gradients_unless_skipped(skip, [tensor.grad], [buffer])  # type: ignore[list-item]
        buffer.lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(buffer, momentum) if self._optim.muon_nesterov else buffer.clone()

    def _orthogonalize(self, matrices: Sequence[DividedMatrix], wholes: Sequence[torch.Tensor]) -> None:
        """Replaces whole tensors by their updates; matrices of equal shape are batched."""
        optim = self._optim
        device_type = wholes[0].device.type if wholes else "cpu"
        steps, dtype = optim.muon_num_ns_steps, _DTYPES[optim.orthogonalization_dtype(device_type)]
        parts = [list(matrix.matrices(whole)) for matrix, whole in zip(matrices, wholes, strict=True)]
        by_shape: dict[torch.Size, list[tuple[int, int]]] = defaultdict(list)
        for number, each in enumerate(parts):
            for position, matrix in enumerate(each):
                by_shape[matrix.shape].append((number, position))
        for (rows, columns), members in by_shape.items():
            stacked = torch.stack([parts[number][position] for number, position in members])
            result = orthogonalized(stacked, optim.muon_coefficient_type, steps, dtype)
            result.mul_(SCALES[optim.muon_scale_mode](rows, columns) * optim.muon_extra_scale_factor)
            for (number, position), matrix in zip(members, result, strict=True):
                parts[number][position] = matrix
        for each_matrix, whole, each in zip(matrices, wholes, parts, strict=True):
            each_matrix.replace(whole, each)


class MuonPlan(OptimizerPlan[Muon]):
    """Muon for the matrices of blocks, which are separate groups, and AdamW for the rest."""

    moments = ADAMS_MOMENTS
    offload_refusal = (
        "--optimizer muon cannot be combined with offload_optimizer in the --deepspeed_config file: its matrix "
        "products must run on the device. Remove the entry; --zero-stage 2 partitions the state."
    )

    def group_entries(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return {_IS_ORTHOGONAL: True} if is_block_matrix(parameter) else {}

    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> Muon:
        others = [group for group in groups if not group.get(_IS_ORTHOGONAL)]
        rest = adamw(self.optim, others, implementation) if others else None
        return Muon(groups, rest, self.optim.lr or 0.0, self.optim)

    def connect(self, optimizer: Muon, trained: Sequence[nn.Parameter], slice_of: SliceOf, mesh: ParallelMesh) -> None:
        optimizer.connect(held_matrices(trained, slice_of, mesh))

    def moments_of(self, parameter: nn.Parameter) -> Mapping[Kind, str]:
        return MOMENTUM if is_block_matrix(parameter) else ADAMS_MOMENTS


def _tensors_of(group: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors with a gradient in a group whose matrices are orthogonalized; empty for other groups."""
    return [tensor for tensor in group["params"] if tensor.grad is not None] if group.get(_IS_ORTHOGONAL) else []

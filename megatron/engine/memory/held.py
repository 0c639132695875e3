"""The memory of an engine, counted over its tensors and DeepSpeed's.

A byte counts once even if several tensors share it: DeepSpeed uses views of flat buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.engine.deepspeed_internals.parameters import partition_of, whole_numel
from megatron.engine.engine import Engine
from megatron.engine.memory.closed_form import Amounts, Partitioning, predicted_bytes
from megatron.engine.tensor_parts import is_block_matrix, tensors_in
from megatron.parallel.shard_spec import shard_spec_of


def held_bytes(engine: Engine) -> Amounts:
    """Counts the memory of a rank now; call it when the update begins, to compare with `predicted_amounts`."""
    weights = list(_weights(engine))
    parameters = _Ranges(weights)
    gradients = _Ranges(engine.view.gradients())
    means = () if engine.averages is None else engine.averages.means
    optimizer = _Ranges([*engine.view.masters(), *tensors_in(dict(engine.optimizer.state)), *means]).without(parameters)
    kinds = (parameters, gradients, optimizer)
    accelerator = engine.mesh.device.type
    on_device = sum(ranges.size(accelerator) for ranges in kinds)
    return Amounts(parameters.size(), gradients.size(), optimizer.size(), on_device)


def predicted_amounts(
    engine: Engine, *, offloads_optimizer: bool, offloads_parameters: bool, offloaded_ratio: float = 1.0
) -> Amounts:
    """The closed form of an engine's memory when the update begins; see `Partitioning` for the arguments."""
    stage, ranks, weight_bytes = engine.zero_stage, engine.mesh.gradient.size, engine.steps.dtype.itemsize
    layout = Partitioning(stage, ranks, offloads_optimizer, offloads_parameters, weight_bytes, offloaded_ratio)
    groups = [group for group in engine.view.groups() if group]
    return predicted_bytes(
        [[whole_numel(parameter) for parameter in group] for group in groups],
        layout,
        [shard_spec_of(group[0]).replicas(engine.mesh).size for group in groups],  # experts have fewer replicas
        [engine.plan.optim.state_bytes(of_blocks=is_block_matrix(group[0])) for group in groups],
    )


class _Ranges:
    """Disjoint ranges of addresses on each kind of device."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in tensors:
            if tensor.numel():
                first = tensor.data_ptr()
                ranges = self._ranges.setdefault(tensor.device.type, [])
                ranges.append((first, first + tensor.numel() * tensor.element_size()))
        self._ranges = {kind: _merged(ranges) for kind, ranges in self._ranges.items()}

    def size(self, kind: str | None = None) -> int:
        """Bytes on one kind of device, or on all."""
        kinds = self._ranges if kind is None else [kind]
        return sum(last - first for kind in kinds for first, last in self._ranges.get(kind, ()))

    def without(self, others: _Ranges) -> _Ranges:
        """The ranges that do not start in one of `others`: a master weight may be the weight itself."""
        left = _Ranges(())
        for kind, ranges in self._ranges.items():
            known = others._ranges.get(kind, [])
            left._ranges[kind] = [each for each in ranges if not any(a <= each[0] < b for a, b in known)]
        return left


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _weights(engine: Engine) -> Iterator[torch.Tensor]:
    for parameter in engine.parameters():
        partition = partition_of(parameter)
        if partition is not None:
            yield partition
        yield parameter.data

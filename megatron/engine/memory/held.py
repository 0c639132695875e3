"""The bytes that an engine holds, counted over the tensors that DeepSpeed keeps for them.

A byte counts once, however many tensors show it: DeepSpeed hands out views into flat buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.engine.engine import Engine
from megatron.engine.memory.amounts import Amounts
from megatron.engine.state import optimizer_slices

# Where DeepSpeed's optimizers keep gradients that are not the `grad` of a tensor.
_GRADIENT_HOLDERS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")


def held_bytes(engine: Engine) -> Amounts:
    """Counts what a rank holds at the time of the call.

    When the update begins (`Engine.on_phase` is called with "step"), these are the gradients of a whole global batch.
    """
    weights = list(_weights(engine))
    masters = _distinct(part.flat for part in optimizer_slices(engine))
    parameters = _Spans(weights)
    gradients = _Spans(_gradients(engine, masters))
    optimizer = _Spans([*masters, *_tensors(dict(engine.optimizer.state))]).without(parameters)
    kinds = (parameters, gradients, optimizer)
    accelerator = engine.mesh.device.type
    on_device = sum(spans.size(accelerator) for spans in kinds)
    return Amounts(parameters.size(), gradients.size(), optimizer.size(), on_device)


def parameter_groups(engine: Engine) -> list[list[int]]:
    """Number of elements of each trained parameter, by group of the optimizer, in the order of the groups."""
    groups = engine.deepspeed.optimizer
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        found = getattr(groups, name, None)
        if found:
            return [[int(getattr(item, "ds_numel", item.numel())) for item in group] for group in found]
    return [[parameter.numel() for parameter in group["params"]] for group in engine.optimizer.param_groups]


class _Spans:
    """Ranges of addresses on each kind of device, without overlaps."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in tensors:
            if tensor.numel():
                first = tensor.data_ptr()
                spans = self._ranges.setdefault(tensor.device.type, [])
                spans.append((first, first + tensor.numel() * tensor.element_size()))
        self._ranges = {kind: _merged(spans) for kind, spans in self._ranges.items()}

    def size(self, kind: str | None = None) -> int:
        """Bytes on one kind of device, or on all."""
        kinds = self._ranges if kind is None else [kind]
        return sum(last - first for kind in kinds for first, last in self._ranges.get(kind, ()))

    def without(self, others: _Spans) -> _Spans:
        """The ranges that do not begin in one of `others`: a master weight may be the weight itself."""
        left = _Spans(())
        for kind, spans in self._ranges.items():
            known = others._ranges.get(kind, [])
            left._ranges[kind] = [span for span in spans if not any(a <= span[0] < b for a, b in known)]
        return left


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first < found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _weights(engine: Engine) -> Iterator[torch.Tensor]:
    for parameter in engine.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            yield partition
        yield parameter.data


def _gradients(engine: Engine, masters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in (*engine.parameters(), *masters):
        yield from _tensors([tensor.grad, getattr(tensor, "grad_accum", None)])
    wrapper = engine.deepspeed.optimizer
    for name in _GRADIENT_HOLDERS:
        yield from _tensors(getattr(wrapper, name, None))
    yield from _tensors(getattr(wrapper, "fp32_groups_gradients_flat", None))


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

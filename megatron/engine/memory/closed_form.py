"""The memory of training on a rank, as a function of the number of parameters.

With P parameters, of which a rank updates O (P/N on N ranks), weights of k bytes (4 in fp32, 2 in half precision), and
m bytes of optimizer state per element (AdamW's two moments: 8):

    stage      parameters   gradients     optimizer
    0, fp32    4 P          4 P           m P
    1          k P          4 P           (4 + m) O; in fp32 m O
    2          k P          4 O           (4 + m) O; in fp32 m O
    3          k O          4 O           (4 + m) O

Gradients are accumulated in fp32, at stage 1 all of them on each rank. The gradients of a backward pass take another
k P bytes until its end. The optimizer updates an fp32 copy of the weights, except at stages 1 and 2 in fp32, where it
updates them in place unless it is offloaded; at stage 3 DeepSpeed makes the copy in fp32, too.

Offloading moves the optimizer's part to host memory, with the gradients that it reads: at stage 1 a copy of the rank's
part, at stage 2 the part itself. At stage 3 the parameter partition can be offloaded as well. Communication buckets,
staging buffers and activations are not counted.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3, where
fp16 gradients are not accumulated in fp32; DeepSpeed `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and
`runtime/bf16_optimizer.py` for the actual memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Amounts:
    """Bytes on one rank.

    Attributes:
        parameters: the weights of forward and backward.
        gradients: the gradients at the start of the update.
        optimizer: fp32 master weights, if they are a copy, moments, and averaged weights.
        on_device: the part of these bytes in device memory; all of them on a machine without an accelerator.
    """

    parameters: int
    gradients: int
    optimizer: int
    on_device: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


_FP32 = 4


@dataclass(frozen=True)
class Partitioning:
    """The partitioning of the training state.

    Attributes:
        stage: the ZeRO stage.
        ranks: number of data-parallel ranks.
        offloads_optimizer: the optimizer's part is in host memory.
        offloads_parameters: the parameter partition is in host memory, too (stage 3).
        weight_bytes: bytes of a weight in forward and backward, 4 or 2.
        offloaded_ratio: share of the optimizer's part in host memory, if offloaded (stage 3); the rest, with the
            gradients that the optimizer reads, is on the device, rounded down to whole sub-groups.
    """

    stage: int
    ranks: int
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    weight_bytes: int = _FP32
    offloaded_ratio: float = 1.0


def predicted_bytes(
    groups: Sequence[Sequence[int]],
    layout: Partitioning,
    ranks: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
) -> Amounts:
    """The memory of a rank in bytes.

    Args:
        groups: number of elements of each parameter, by optimizer group.
        layout: the partitioning.
        ranks: number of ranks that partition each group; `layout.ranks` by default.
        states: `OptimizerFields.state_bytes` of each group; AdamW's by default.
    """
    total = sum(map(sum, groups))
    counts = [layout.ranks] * len(groups) if ranks is None else ranks
    owned = [-(-sum(group) // count) for group, count in zip(groups, counts, strict=True)]
    state_bytes = [2 * _FP32] * len(groups) if states is None else states
    local = sum(owned)
    weights = layout.weight_bytes * (total if layout.stage < 3 else local)
    updated = [sum(group) for group in groups] if layout.stage == 0 else owned
    updates_in_place = layout.weight_bytes == _FP32 and layout.stage < 3 and not layout.offloads_optimizer
    copied = 0 if layout.stage == 0 or updates_in_place else local
    optimizer = sum(count * each for count, each in zip(updated, state_bytes, strict=True)) + _FP32 * copied
    on_device, on_host = _gradients(layout, total, local)
    device_bytes = on_device
    device_bytes += 0 if layout.offloads_parameters else weights
    if not layout.offloads_optimizer:
        device_bytes += optimizer
    elif layout.offloaded_ratio < 1:
        device_bytes += int((1 - layout.offloaded_ratio) * (optimizer + _FP32 * local))
    return Amounts(weights, on_device + on_host, optimizer, device_bytes)


def _gradients(layout: Partitioning, total: int, local: int) -> tuple[int, int]:
    """Bytes of the gradients on the device and on the host."""
    if layout.stage == 0:
        return layout.weight_bytes * total, 0
    if layout.stage == 1:
        return _FP32 * total, _FP32 * local if layout.offloads_optimizer else 0
    if not layout.offloads_optimizer:
        return _FP32 * local, 0
    if layout.stage == 2:
        return 0, _FP32 * local
    return 0, 2 * _FP32 * local  # the accumulation buffer, and the gradients that the optimizer reads

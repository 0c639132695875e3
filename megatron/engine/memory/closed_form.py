"""The bytes that training holds on a rank, as a function of the number of parameters.

With P parameters of which a rank updates O (1/N of them on N ranks), weights of k bytes (4 in fp32, 2 in half
precision), and m bytes that the optimizer keeps of an element (AdamW's two moments: 8):

    stage      parameters   gradients     optimizer
    0, fp32    4 P          4 P           m P
    1          k P          4 P           (4 + m) O; in fp32 m O
    2          k P          4 O           (4 + m) O; in fp32 m O
    3          k O          4 O           (4 + m) O

Gradients are accumulated in fp32, all of them by each rank at stage 1. Those that backward has just computed come on
top of that, k P, until they have been added at its end. The optimizer updates a copy of the weights in fp32, except at
stages 1 and 2 in fp32, where it updates them in place unless it is offloaded. At stage 3 DeepSpeed copies them in fp32
too.

Offloading puts the optimizer's part into the memory of the host, with the gradients that it reads: at stage 1 a copy of
the part that falls to the rank, at stage 2 the part itself. At stage 3 the partition of the parameters can follow.
Buckets of communication and staging buffers are not counted: their sizes are settings, not a matter of the model. Nor
are activations.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3, where
fp16 gradients are not accumulated in fp32; DeepSpeed `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and
`runtime/bf16_optimizer.py` for what is held in fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Amounts:
    """Bytes on one rank.

    Attributes:
        parameters: the weights that forward and backward compute with.
        gradients: what is held of the gradients when the update begins.
        optimizer: fp32 master weights, where they are a copy, the moments, and means of weights.
        on_device: how many of all these bytes are in the memory of the device, not the host's; on a machine
            without an accelerator all of them.
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
    """How the state of training is divided.

    Attributes:
        stage: the ZeRO stage.
        ranks: number of data-parallel ranks.
        offloads_optimizer: whether the optimizer's part is in the memory of the host.
        offloads_parameters: whether the partition of the parameters is, too (stage 3).
        weight_bytes: bytes of a weight that the network computes with, 4 or 2.
        offloaded_ratio: share of the optimizer's part that is in the memory of the host, if it is offloaded (stage 3);
            the rest, with the gradients that the optimizer reads, is on the device as far as whole sub-groups fit.
    """

    stage: int
    ranks: int
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    weight_bytes: int = _FP32
    offloaded_ratio: float = 1.0


def predicted_bytes(
    groups: Sequence[Sequence[int]],
    how: Partitioning,
    ranks: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
) -> Amounts:
    """The bytes of a rank.

    Args:
        groups: number of elements of each parameter, by group of the optimizer.
        how: the layout.
        ranks: over how many each group is divided; over `how.ranks` by default.
        states: `OptimizerFields.state_bytes` of each group; those of AdamW by default.
    """
    everything = sum(map(sum, groups))
    counts = [how.ranks] * len(groups) if ranks is None else ranks
    owned = [-(-sum(group) // count) for group, count in zip(groups, counts, strict=True)]
    kept = [2 * _FP32] * len(groups) if states is None else states
    own = sum(owned)
    weights = how.weight_bytes * (everything if how.stage < 3 else own)
    updated = [sum(group) for group in groups] if how.stage == 0 else owned
    updates_in_place = how.weight_bytes == _FP32 and how.stage < 3 and not how.offloads_optimizer
    copied = 0 if how.stage == 0 or updates_in_place else own
    optimizer = sum(count * each for count, each in zip(updated, kept, strict=True)) + _FP32 * copied
    on_device, on_host = _gradients(how, everything, own)
    here = on_device
    here += 0 if how.offloads_parameters else weights
    if not how.offloads_optimizer:
        here += optimizer
    elif how.offloaded_ratio < 1:
        here += int((1 - how.offloaded_ratio) * (optimizer + _FP32 * own))
    return Amounts(weights, on_device + on_host, optimizer, here)


def _gradients(how: Partitioning, everything: int, own: int) -> tuple[int, int]:
    """Bytes of the gradients on the device and on the host."""
    if how.stage == 0:
        return how.weight_bytes * everything, 0
    if how.stage == 1:
        return _FP32 * everything, _FP32 * own if how.offloads_optimizer else 0
    if not how.offloads_optimizer:
        return _FP32 * own, 0
    if how.stage == 2:
        return 0, _FP32 * own
    return 0, 2 * _FP32 * own  # the buffer in which they are accumulated, and what the optimizer reads

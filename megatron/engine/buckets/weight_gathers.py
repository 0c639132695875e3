"""Gathering of updated weights over data-parallel ranks, while the next forward pass runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.buckets.bucket_queue import forward_order
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage, start_all_gather


class WeightGathers:
    """Gathers flat buffers of weights, of which each rank has updated its part.

    Args:
        flats: the buffer of each group.
        axes: the ranks that have parts of each.
        groups: the parameters in each buffer.
        order: see `BucketQueue`; forward passes read the first parameters first.
        overlaps: `start` does not wait for the messages.

    Shapes: each flat `[n]`, with `n` a multiple of the size of its axis.
    """

    def __init__(
        self,
        flats: Sequence[torch.Tensor],
        axes: Sequence[Axis],
        groups: Sequence[FlatGroup],
        order: Mapping[int, int],
        *,
        overlaps: bool,
    ) -> None:
        self._order = forward_order([group.parameters for group in groups], order)
        self._flats, self._axes, self._overlaps = flats, axes, overlaps
        self._index = {id(each): index for index, group in enumerate(groups) for each in group.parameters}
        self._pending: dict[int, PendingMessage] = {}

    @torch.no_grad()
    def start(self) -> None:
        """Starts to gather all buffers, after `wait`; collective."""
        for index in self._order:
            self._pending[index] = start_all_gather(self._flats[index], self._axes[index])
        if not self._overlaps:
            self.wait()

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Waits for the buffers of these parameters; all by default."""
        if not self._pending:
            return
        indices = self._pending if parameters is None else {self._index.get(id(each)) for each in parameters}
        for index in [each for each in self._pending if each in indices]:
            self._pending.pop(index).wait()

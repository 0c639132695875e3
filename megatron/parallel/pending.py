"""An asynchronous all-reduce, for agreement without blocking the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis


class PendingMaximum:
    """An all-reduce in flight: the maximum of the ranks' integers; collective over the axis.

    Args:
        value: this rank's integer, from 0 to 2^31 - 1.
        axis: the participating ranks; its group must support CPU tensors, as `ParallelMesh.control` does.
    """

    def __init__(self, value: int, axis: Axis) -> None:
        self._word = torch.tensor([value], dtype=torch.int32)
        self._work: dist.Work | None = None
        if axis.size > 1:
            self._work = dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=axis.group, async_op=True)

    def wait(self) -> int:
        """Waits for all ranks and returns the maximum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._word)

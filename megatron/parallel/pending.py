"""Agreement that does not stop the caller: a collective that runs while the ranks go on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis


class PendingMaximum:
    """The largest of the ranks' whole numbers, on its way; collective over the axis.

    Args:
        value: this rank's number, from 0 to 2^31 - 1.
        axis: ranks that agree; its group must carry CPU tensors, as `ParallelMesh.control` does.
    """

    def __init__(self, value: int, axis: Axis) -> None:
        self._word = torch.tensor([value], dtype=torch.int32)
        self._work: dist.Work | None = None
        if axis.size > 1:
            self._work = dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=axis.group, async_op=True)

    def wait(self) -> int:
        """The maximum, once every rank has given its number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._word)

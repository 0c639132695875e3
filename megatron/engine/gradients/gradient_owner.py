"""The step's own gradients, from the end of a backward pass to the update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.gradient_sum import GradientSum, Look, Partial, Tied
from megatron.engine.gradients.loss_scale import LossScale
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.kernels.optimizer import update
from megatron.parallel.tensor.weight_gradients import AddProduct


class GradientOwner:
    """What an optimizer of ZeRO 0, 1 or 2 offers to whoever runs the backward passes, which are torch's own.

    A step is

        owner.begin(passes)              if the number of backward passes is known
        owner.accumulate(parameters)     after every backward pass; any number of calls
        owner.reduce()                   once: over data-parallel ranks, then over the ranks that hold tied weights
        deepspeed.step()                 once: measures, clips and updates

    Nothing is divided by the number of micro-batches: the loss is to be, and multiplied by the loss scale in fp16.
    `reduce` takes the mean over data-parallel ranks.

    Args:
        gradients: where gradients are added up.
        clipping: how they are measured and limited.
        trained: all parameters that have them.
    """

    def __init__(self, gradients: GradientSum, clipping: Clipping, trained: Sequence[nn.Parameter]) -> None:
        self._sum = gradients
        self._clipping = clipping
        self._trained = trained
        self._partial: Partial = ()
        self._tied: Tied = ()

    def begin(self, passes: int) -> None:
        """Announces the number of backward passes of a step: the gradients of a single one need no sum."""
        self._sum.begin(passes)

    def accumulate(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Adds the gradients of a backward pass to their sums, in fp32, and frees them.

        With ZeRO 2 it is collective over data-parallel ranks, which call it for the same parameters in the same order.

        Args:
            parameters: those whose gradients are complete, frozen ones excluded; all by default.
        """
        self._sum.add(self._trained if parameters is None else parameters)

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """See `GradientSum.product_adder`; `accumulate` does not find what was added so."""
        return self._sum.product_adder(dtype)

    def sum_over_ranks(self, partial: Partial, tied: Tied) -> None:
        """Has `reduce` sum more than averages, before the first step.

        Args:
            partial: parameters of which the ranks of an axis have the gradients of different tokens, which are summed
                in one message for each axis.
            tied: weights that other stages also hold, each with the axis of the ranks that do.
        """
        self._partial, self._tied = partial, tied
        for _, parameters in partial:
            self._sum.keep_whole(parameters)

    def reduce(self) -> None:
        """Sums partial gradients over the ranks of their axis, averages everything over data-parallel ranks, and sums
        tied weights over the ranks that hold them; once a step, after the last `accumulate`; collective.
        """
        self._sum.show()
        for axis, parameters in self._partial:
            self._sum.sum_over(axis, parameters)
        self._sum.reduce(self._tied)

    def measure(self, loss_scale: LossScale | None = None) -> torch.Tensor:
        """The global norm of what was reduced, without the loss scale; collective.

        Shapes: result `[]` float64.
        """
        norm = self._clipping.norm(self._sum.counted, self._sum.divided_over)
        return norm if loss_scale is None else norm / loss_scale.value

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        gate: UpdateGate,
        norm: torch.Tensor,
        copies: Sequence[Sequence[torch.Tensor]],
        loss_scale: LossScale | None = None,
    ) -> bool:
        """Clips and has the optimizer update through a gate, see `UpdateGate.update`; collective.

        An optimizer that is offloaded has memory of its own for the gradients.
        """
        masters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        unflattened = self._sum.unflattened
        for master, part in zip(masters, () if unflattened else self._sum.parts, strict=False):
            if master.grad is None:
                master.grad = part.to(master)
            elif master.grad is not part:
                master.grad.copy_(part)
        factor = self._clipping.factor(norm)
        if loss_scale is not None:
            factor = loss_scale.value.reciprocal() if factor is None else factor / loss_scale.value
        factor = None if factor is None else factor.to(masters[0].device)
        return gate.update(
            partial(update, optimizer, gradient_factor=factor, copies=copies, unflattened=unflattened), loss_scale
        )

    def look_at_own(self, look: Look) -> None:
        """Has a function see this rank's gradients of the next step, bucket by bucket, before ranks sum them."""
        self._sum.look = look

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """What this rank updates with, averaged over the data-parallel ranks, between `reduce` and the update."""
        return iter(self._sum.parts or self._sum.buffers)

    def sums(self) -> Iterator[torch.Tensor]:
        """All that is held of gradients, parameters' included; some of the tensors show the same memory."""
        yield from (*self._sum.parts, *self._sum.buffers)
        yield from (parameter.grad for parameter in self._trained if parameter.grad is not None)

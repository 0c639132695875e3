"""The gradients of a step, from the end of a backward pass to the update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.gradient_sum import BucketHook, GradientSum, Partial, Tied
from megatron.engine.gradients.loss_scale import LossScale
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.kernels.optimizer import update
from megatron.parallel.tensor.weight_gradients import AddProduct


class GradientOwner:
    """Accumulates, reduces, clips and applies the gradients of ordinary backward passes with ZeRO 0, 1 or 2.

    A step is

        owner.begin(passes)              if the number of backward passes is known
        owner.begin_last(parameters)     before their last backward pass, to send gradients while it runs; optional
        owner.accumulate(parameters)     after every backward pass; any number of calls
        owner.end_last(parameters)       after their last backward pass, to send gradients while others run; optional
        owner.reduce()                   once: over data-parallel ranks, then over the ranks that hold tied weights
        deepspeed.step()                 once: measures, clips and updates

    `reduce` takes the mean over data-parallel ranks, but does not divide by the number of micro-batches: the loss must
    be divided by it, and multiplied by the loss scale in fp16.

    Args:
        gradients: accumulates gradients.
        clipping: measures and clips them.
        trained: all trained parameters.
        overlaps: gradients are sent as soon as they are complete, while backward passes run.
    """

    def __init__(
        self, gradients: GradientSum, clipping: Clipping, trained: Sequence[nn.Parameter], *, overlaps: bool
    ) -> None:
        self._sum = gradients
        self._clipping = clipping
        self._trained = trained
        self._partial: Partial = ()
        self._tied: Tied = ()
        self._overlaps, self._is_in_last = overlaps, dict[int, bool]()  # by id; True after its hook

    def send_in_backward(self) -> None:
        """From now on, hooks send each bucket as soon as a backward pass has completed it; see `begin_last`."""
        owner = weakref.proxy(self)  # torch hides a hook's references from the garbage collector
        for parameter in self._trained if self._overlaps else ():
            parameter.register_post_accumulate_grad_hook(lambda each: owner._on_gradient(each))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._sum.sends_each_pass:
            if (was_sent := self._is_in_last.get(id(parameter))) is None:
                return
            if was_sent:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was computed twice in a pass, the "
                    "second time after it had been sent. Use --no-overlap-grad-reduce."
                )
            self._is_in_last[id(parameter)] = True
        self._sum.complete((parameter,))

    def begin(self, passes: int) -> None:
        """Announces the number of backward passes of a step: with one, gradients need no accumulation."""
        self._sum.begin(passes)

    def begin_last(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Announces the last backward pass of a step for these parameters, all by default.

        Not for a pass in halves, whose hooks run before gradients are complete.
        """
        if self._overlaps:
            self._is_in_last.update(dict.fromkeys(map(id, self._trained if parameters is None else parameters), False))

    def accumulate(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Adds the gradients of a backward pass to their sums, in fp32, and frees them.

        With ZeRO 2, collective over data-parallel ranks, with the same parameters in the same order.

        Args:
            parameters: trained parameters whose gradients are complete; all by default.
        """
        self._sum.add(self._trained if parameters is None else parameters)

    def end_last(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Announces that the accumulated gradients of these parameters, all by default, are those of the step.

        Collective over data-parallel ranks, as `accumulate`.
        """
        if self._overlaps:
            self._sum.complete(self._trained if parameters is None else parameters)

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """See `GradientSum.product_adder`; it leaves no gradient for `accumulate`."""
        return self._sum.product_adder(dtype)

    def sum_over_ranks(self, partial: Partial, tied: Tied) -> None:
        """Sets further sums for `reduce`, before the first step.

        Args:
            partial: by axis, parameters whose gradients come from different tokens on each of its ranks; summed in one
                message per axis.
            tied: weights that other stages also hold, each with the axis of these stages.
        """
        self._partial, self._tied = partial, tied
        for _, parameters in partial:
            self._sum.keep_whole(parameters)

    def reduce(self) -> None:
        """Sums partial gradients over their axis, averages all over data-parallel ranks, and sums tied weights over
        their stages; once a step, after the last `accumulate`; collective.
        """
        self._sum.run_before_reduce()
        for axis, parameters in self._partial:
            self._sum.sum_over(axis, parameters)
        self._sum.reduce(self._tied)
        self._is_in_last.clear()

    def measure(self, loss_scale: LossScale | None = None) -> torch.Tensor:
        """The global norm of the reduced gradients, without the loss scale; collective.

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
        """Clips, and updates if the gate allows it, see `UpdateGate.update`; collective."""
        masters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        unflattened = self._sum.unflattened
        for master, part in zip(masters, () if unflattened else self._sum.parts, strict=False):
            if master.grad is None:
                master.grad = part.to(master)  # a copy in host memory, if the optimizer is offloaded
            elif master.grad is not part:
                master.grad.copy_(part)
        factor = self._clipping.factor(norm)
        if loss_scale is not None:
            factor = loss_scale.value.reciprocal() if factor is None else factor / loss_scale.value
        factor = None if factor is None else factor.to(masters[0].device)
        return gate.update(
            partial(update, optimizer, gradient_factor=factor, copies=copies, unflattened=unflattened), loss_scale
        )

    def set_before_reduce(self, hook: BucketHook) -> None:
        """Sets a hook for the next step: it receives each bucket of this rank's gradients before the sum over ranks."""
        self._sum.before_reduce = hook

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """The averaged gradients for this rank's update; call it between `reduce` and the update."""
        return iter(self._sum.parts or self._sum.buffers)

    def sums(self) -> Iterator[torch.Tensor]:
        """All tensors with gradients, `.grad` included; some share memory."""
        yield from (*self._sum.parts, *self._sum.buffers)
        yield from (parameter.grad for parameter in self._trained if parameter.grad is not None)

"""The forward and backward passes of the micro-batches of a global batch, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.device import GraphCapturer
from megatron.engine.cuda_graphs import MicroBatchGraphs
from megatron.engine.deepspeed_internals import OptimizerView
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.step_loss import StepLoss
from megatron.model.interface.network import LayerStack


class Passes(Protocol):
    """How the micro-batches of a global batch pass through the network."""

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs forward and backward passes, reduces the gradients and updates the weights."""

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs forward passes without gradients; the network is in evaluation mode."""


class PlainPasses:
    """Every rank has the whole network; DeepSpeed's engine runs it, or CUDA graphs do.

    Args:
        deepspeed: the engine.
        stack: its network.
        view: of its optimizer.
        enter: called with each phase that begins.
    """

    def __init__(self, deepspeed: Any, stack: LayerStack, view: OptimizerView, enter: Callable[[str], None]) -> None:
        self._deepspeed, self._stack, self._view, self._enter = deepspeed, stack, view, enter
        self._graphs: MicroBatchGraphs | None = None
        self._losses: StepLoss

    def use_graphs(self, capturer: GraphCapturer) -> None:
        """Captures micro-batches as CUDA graphs from now on."""
        parameters = (parameter for parameter in self._stack.parameters() if hasattr(parameter, "global_name"))
        self._graphs = MicroBatchGraphs(parameters, self._forward_alone, capturer)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs one micro-batch after the other."""
        self._losses = losses
        for number, batch in enumerate(batches, start=1):
            # DeepSpeed's own micro-batch count is wrong after the batch size has changed.
            self._deepspeed.set_gradient_accumulation_boundary(number == len(batches))
            self._enter("forward")
            if self._graphs is None:
                loss = self._loss(batch, losses)
            else:
                loss = self._graphed_loss(batch, self._graphs, len(batches))
            self._enter("backward")
            self._deepspeed.backward(loss)
            self._enter("step")
            self._deepspeed.step()

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs one micro-batch after the other."""
        with torch.no_grad():
            for batch in batches:
                self._enter("forward")
                self._loss(batch, losses)

    def _loss(self, batch: DeviceBatch, losses: StepLoss) -> torch.Tensor:
        context = losses.context_of(batch)
        outputs = self._deepspeed(batch.network_input, context)
        return losses.of(outputs, batch.targets, context.auxiliary.sums())

    def _graphed_loss(self, batch: DeviceBatch, graphs: MicroBatchGraphs, count: int) -> torch.Tensor:
        """The loss of a micro-batch whose gradients the parameters have already, so that its backward is empty."""
        losses = self._losses
        outcome = graphs.run(batch, (count, batch.target_names, losses.settings, id(losses.objective)))
        graphs.give(outcome, adds_up=self._view.is_direct and count > 1)
        losses.totals.add_sums(outcome.sums)
        return outcome.loss.detach().requires_grad_().view(())  # DeepSpeed asks what it was computed by

    def _forward_alone(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch as its backward pass begins with it, and its own totals, without DeepSpeed."""
        losses = self._losses.with_new_totals()
        context = losses.context_of(batch)
        loss = losses.of(self._stack(batch.network_input, context), batch.targets, context.auxiliary.sums())
        return loss * losses.backward_scale, losses.totals.sums

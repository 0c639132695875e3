"""The forward and backward passes of the micro-batches of a global batch, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.device import CaptureError, GraphCapturer
from megatron.engine.cuda_graphs import MicroBatchGraphs, warn_of_capture
from megatron.engine.deepspeed_internals.base_view import OptimizerView
from megatron.engine.deepspeed_internals.optimizer_views import OwningView
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.base import Passes
from megatron.engine.passes.step_loss import StepLoss
from megatron.model.interface.network import LayerStack


class PlainPasses(Passes[OwningView]):
    """Every rank has the whole network and runs it, or CUDA graphs do; the gradients are the step's own.

    Args:
        stack: the network.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self._graphs: MicroBatchGraphs | None = None
        self._losses: StepLoss

    def use_graphs(self, capturer: GraphCapturer) -> None:
        parameters = (parameter for parameter in self.module.parameters() if hasattr(parameter, "global_name"))
        self._graphs = MicroBatchGraphs(parameters, self._forward_alone, capturer)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        self._losses = losses
        self._view.begin(len(batches))
        for batch in batches:
            self._enter("forward")
            if self._graphs is None or not self._run_graph(batch, self._graphs, len(batches)):
                # With a gradient for the loss torch would import sympy, a second at every start, to compare two shapes.
                loss = losses.scaled(_loss(self.module, batch, losses))
                self._enter("backward")
                torch.autograd.backward(loss)
            self._view.accumulate()
        self._view.reduce()
        self._enter("step")
        self._deepspeed.step()

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        _evaluate(self.module, batches, losses, self._enter)

    def _run_graph(self, batch: DeviceBatch, graphs: MicroBatchGraphs, count: int) -> bool:
        """Has a graph run forward and backward, and gives the parameters their gradients.

        Returns:
            whether it did: what cannot be captured is run without graphs from now on.
        """
        losses = self._losses
        try:
            outcome = graphs.run(batch, (count, batch.target_names, losses.settings, id(losses.objective)))
        except CaptureError as failure:
            self._graphs = None
            graphs.release()
            warn_of_capture(failure)
            return False
        self._enter("backward")
        graphs.give(outcome, adds_up=self._view.is_direct and count > 1)
        losses.totals.add_sums(outcome.sums)
        return True

    def _forward_alone(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch as its backward pass begins with it, and its own totals, without DeepSpeed."""
        losses = self._losses.with_new_totals()
        return losses.scaled(_loss(self.module, batch, losses)), losses.totals.sums


class ShardedPasses(Passes[OptimizerView]):
    """With ZeRO 3: DeepSpeed's engine runs the network, whose weights it gathers, and adds the gradients up."""

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        for number, batch in enumerate(batches, start=1):
            # DeepSpeed's own micro-batch count is wrong after the batch size has changed.
            self._deepspeed.set_gradient_accumulation_boundary(number == len(batches))
            self._enter("forward")
            loss = _loss(self._deepspeed, batch, losses)
            self._enter("backward")
            self._deepspeed.backward(loss)
            self._enter("step")
            self._deepspeed.step()

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        _evaluate(self._deepspeed, batches, losses, self._enter)


def _loss(network: Callable[..., Any], batch: DeviceBatch, losses: StepLoss) -> torch.Tensor:
    context = losses.context_of(batch)
    outputs = network(batch.network_input, context)
    return losses.of(outputs, batch.targets, context.auxiliary.sums())


def _evaluate(
    network: Callable[..., Any], batches: Sequence[DeviceBatch], losses: StepLoss, enter: Callable[[str], None]
) -> None:
    with torch.no_grad():
        for batch in batches:
            enter("forward")
            _loss(network, batch, losses)

"""The forward and backward passes of the micro-batches of a global batch, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.device import CaptureError, GraphCapturer
from megatron.engine.cuda_graphs import MicroBatchGraphs, warn_of_capture
from megatron.engine.deepspeed_internals.base_view import OptimizerView
from megatron.engine.deepspeed_internals.optimizer_views import OwningView
from megatron.engine.gradients.gradient_sum import Partial, Tied
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.base import Passes
from megatron.engine.passes.step_loss import StepLoss
from megatron.model.interface.network import LayerStack


class PlainPasses(Passes[OwningView]):
    """Runs the whole network on every rank, optionally as CUDA graphs, with ZeRO 0, 1 or 2.

    Args:
        stack: the network.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self._graphs: MicroBatchGraphs | None = None
        self._losses: StepLoss

    def connect(
        self, deepspeed: Any, view: OwningView, partial: Partial, tied: Tied, enter: Callable[[str], None]
    ) -> None:
        super().connect(deepspeed, view, partial, tied, enter)
        view.send_in_backward()

    def use_graphs(self, capturer: GraphCapturer) -> None:
        parameters = (parameter for parameter in self.module.parameters() if hasattr(parameter, "global_name"))
        self._graphs = MicroBatchGraphs(parameters, self._forward_alone, capturer)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        self._losses = losses
        self._view.begin(len(batches))
        if self._graphs is not None:
            self._view.await_weights()
        for number, batch in enumerate(batches, start=1):
            if number == len(batches):
                self._view.begin_last()
            self._enter("forward")
            if self._graphs is None or not self._run_graph(batch, self._graphs, len(batches)):
                # Given an initial gradient, torch would import sympy to compare two shapes, a second at every start.
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
        """Runs forward and backward by a graph, and sets the gradients of parameters.

        Returns:
            False if capturing failed; graphs are then never used again.
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
        graphs.set_gradients(outcome, accumulates=self._view.is_direct and count > 1)
        losses.totals.add_sums(outcome.sums)
        return True

    def _forward_alone(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The scaled loss of a micro-batch, and its sums."""
        losses = self._losses.with_new_totals()
        return losses.scaled(_loss(self.module, batch, losses)), losses.totals.sums


class ShardedPasses(Passes[OptimizerView]):
    """Runs the network in DeepSpeed's engine, which gathers weights and accumulates gradients, with ZeRO 3."""

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        for number, batch in enumerate(batches, start=1):
            # DeepSpeed's own count of micro-batches is wrong after a change of the batch size.
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
    return losses.loss(outputs, batch.targets, context.auxiliary.sums())


def _evaluate(
    network: Callable[..., Any], batches: Sequence[DeviceBatch], losses: StepLoss, enter: Callable[[str], None]
) -> None:
    with torch.no_grad():
        for batch in batches:
            enter("forward")
            _loss(network, batch, losses)

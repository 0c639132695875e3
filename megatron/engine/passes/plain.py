"""The forward and backward passes of the micro-batches of a global batch, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.device import CaptureError, GraphCapturer
from megatron.engine.cuda_graphs import MicroBatchGraphs, warn_of_capture
from megatron.engine.gradients.gradient_owner import GradientOwner
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
    """Every rank has the whole network and runs it, or CUDA graphs do.

    Args:
        deepspeed: the engine that updates the weights.
        stack: the network.
        gradients: takes what the backward passes leave; None if DeepSpeed's engine runs the network, as it must with
            ZeRO 3, whose weights it fetches.
        adds_up: whether autograd adds the gradients of several micro-batches up.
        enter: called with each phase that begins.
    """

    def __init__(
        self,
        deepspeed: Any,
        stack: LayerStack,
        gradients: GradientOwner | None,
        enter: Callable[[str], None],
        *,
        adds_up: bool = False,
    ) -> None:
        self._deepspeed, self._stack, self._gradients, self._enter = deepspeed, stack, gradients, enter
        self._adds_up = adds_up
        self._graphs: MicroBatchGraphs | None = None
        self._losses: StepLoss

    def use_graphs(self, capturer: GraphCapturer) -> None:
        """Captures micro-batches as CUDA graphs from now on."""
        parameters = (parameter for parameter in self._stack.parameters() if hasattr(parameter, "global_name"))
        self._graphs = MicroBatchGraphs(parameters, self._forward_alone, capturer)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        """Runs one micro-batch after the other."""
        self._losses = losses
        if self._gradients is None:
            self._train_by_deepspeed(batches, losses)
            return
        self._gradients.begin(len(batches))
        for batch in batches:
            self._enter("forward")
            if self._graphs is None or not self._run_graph(batch, self._graphs, len(batches)):
                # With a gradient for the loss torch would import sympy, a second at every start, to compare two shapes.
                loss = losses.scaled(self._loss(batch, losses))
                self._enter("backward")
                torch.autograd.backward(loss)
            self._gradients.accumulate()
        self._gradients.reduce()
        self._enter("step")
        self._deepspeed.step()

    def _train_by_deepspeed(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        for number, batch in enumerate(batches, start=1):
            # DeepSpeed's own micro-batch count is wrong after the batch size has changed.
            self._deepspeed.set_gradient_accumulation_boundary(number == len(batches))
            self._enter("forward")
            loss = self._loss(batch, losses)
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
        network = self._stack if self._gradients is not None else self._deepspeed
        outputs = network(batch.network_input, context)
        return losses.of(outputs, batch.targets, context.auxiliary.sums())

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
        graphs.give(outcome, adds_up=self._adds_up and count > 1)
        losses.totals.add_sums(outcome.sums)
        return True

    def _forward_alone(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch as its backward pass begins with it, and its own totals, without DeepSpeed."""
        losses = self._losses.with_new_totals()
        return losses.scaled(self._loss(batch, losses)), losses.totals.sums

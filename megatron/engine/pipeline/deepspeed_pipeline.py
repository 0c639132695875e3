"""The passes of a global batch through DeepSpeed's pipeline engine, which supports 1F1B with one stage per rank.

Its stages exchange tensors only, so a `StepContext` is converted to tensors and back here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from megatron.engine.deepspeed_internals.optimizer_views import OwningView
from megatron.engine.deepspeed_internals.pipeline_stage import (
    BuiltStage,
    call_before_instructions,
    reduce_in,
    set_loss_scale,
)
from megatron.engine.gradients.gradient_sum import Partial, Tied, sum_in_backward
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.passes.base import Passes
from megatron.engine.passes.step_loss import StepLoss
from megatron.model.interface.network import LayerKind, LayerStack
from megatron.objective.base import Outputs
from megatron.parallel.mesh import ParallelMesh

# The phase of each instruction of DeepSpeed's schedule.
_PHASES = {
    schedule.LoadMicroBatch: "forward",
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.SendActivation: "p2p",
    schedule.RecvActivation: "p2p",
    schedule.SendGrad: "p2p",
    schedule.RecvGrad: "p2p",
    schedule.ReduceGrads: "step",
    schedule.ReduceTiedGrads: "step",
    schedule.OptimizerStep: "step",
}


class StageModule(BuiltStage):
    """A stack of layers as a `PipelineModule`.

    The first stage takes `(*inputs, *StepContext.tensors)`, stages send `(hidden, *StepContext.tensors)` to the next
    one, and the last returns the outputs, which may be several tensors.

    Args:
        stack: the layers of this stage.

    Attributes:
        losses: of the current global batch.
    """

    losses: StepLoss

    def __init__(self, stack: LayerStack, mesh: ParallelMesh) -> None:
        super().__init__(mesh, self._loss)
        self.stack = stack

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Runs the stage on the output of the data loader or of the previous stage."""
        settings = self.losses.settings
        layer_inputs, passed = inputs[: -settings.tensor_count], inputs[-settings.tensor_count :]
        context = settings.context_of(passed, backward_scale=self.losses.backward_scale)
        hidden = self.stack(layer_inputs[0] if len(layer_inputs) == 1 else layer_inputs, context)
        self.losses.add_auxiliary(context.auxiliary)
        if self.stack.has(LayerKind.HEAD):
            return hidden
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # the engine runs a backward pass even if all earlier layers are frozen
        return hidden, *context.tensors

    def _loss(self, outputs: Outputs, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.losses.loss(outputs, targets)


class DeepSpeedPasses(Passes[OwningView]):
    """Runs the passes of a global batch in DeepSpeed's pipeline engine; a view reduces the gradients.

    Args:
        stack: the layers of this stage.
    """

    module: StageModule

    def __init__(self, stack: LayerStack, mesh: ParallelMesh) -> None:
        super().__init__(StageModule(stack, mesh))
        self._shape: tuple[int, int, int] | None = None

    def connect(
        self, deepspeed: Any, view: OwningView, partial: Partial, tied: Tied, enter: Callable[[str], None]
    ) -> None:
        """Connects the engine to the view, and sums partial gradients in every backward pass."""
        sum_in_backward(partial)
        super().connect(deepspeed, view, (), tied, enter)
        reduce_in(deepspeed, view)

        def announce(instruction: type) -> None:
            if instruction in _PHASES:
                enter(_PHASES[instruction])

        call_before_instructions(deepspeed, announce)

    def train(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        if self._view.is_scaled:
            set_loss_scale(self._deepspeed, float(self._view.loss_scale()))
        self._deepspeed.train_batch(data_iter=self._begin(batches, losses))

    def evaluate(self, batches: Sequence[DeviceBatch], losses: StepLoss) -> None:
        self._deepspeed.eval_batch(self._begin(batches, losses), num_micro_batches=len(batches))

    def _begin(
        self, batches: Sequence[DeviceBatch], losses: StepLoss
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
        """The micro-batches in the engine's format; resets its buffers if their shape has changed."""
        self.module.losses = losses
        shape = losses.settings.hidden_shape(*batches[0].shape)
        if self._shape not in (None, shape):
            self._deepspeed.reset_activation_shape()
        self._shape = shape
        return iter([((*batch.inputs, *batch.passed), batch.targets) for batch in batches])

"""One pipeline stage in the form that DeepSpeed's pipeline engine runs.

Stages exchange tensors: only here is a `StepContext` turned into tensors and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule
from torch import nn

from megatron.engine.freezing import is_frozen
from megatron.engine.grid import PipelineGrid
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import Axis, ParallelMesh

# What each instruction of a pipeline schedule does.
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


@dataclass(frozen=True)
class StageHooks:
    """The engine's callbacks for a pipeline stage.

    Attributes:
        loss: computes the loss of a micro-batch from its outputs and targets.
        backward_scale: returns the factor by which the loss is multiplied before backward.
        take_auxiliary: receives the losses that layers added in a forward pass.
    """

    loss: Callable[..., torch.Tensor]
    backward_scale: Callable[[], float]
    take_auxiliary: Callable[[AuxiliaryLosses], None]


class StageModule(PipelineModule):
    """A stack of layers as a `PipelineModule`.

    The base class's constructor would build the layers, the grid and process groups, all of which exist already. It is
    therefore not called, and the attributes that the pipeline engine reads are set here.

    The first stage takes `(*inputs, *StepContext.tensors)`, stages send `(hidden, *StepContext.tensors)` to the next
    one, and the last returns the outputs, which may be several tensors.

    Args:
        stack: the layers of this stage.
        hooks: the engine's callbacks.
        tied: the weights that another stage also holds, each with the axis over which its gradient is summed.
    """

    def __init__(
        self,
        stack: LayerStack,
        mesh: ParallelMesh,
        settings: StepSettings,
        hooks: StageHooks,
        tied: list[tuple[nn.Parameter, Axis]],
    ) -> None:
        nn.Module.__init__(self)
        self.stack = stack
        self.settings = settings
        self._hooks = hooks
        self._tied = tied
        self._is_last = mesh.is_last_stage
        self._grid = PipelineGrid(mesh)
        self.loss_fn = hooks.loss
        self.num_stages, self.stage_id = mesh.pp.size, mesh.pp.rank
        self.parts = list(range(mesh.pp.size + 1))
        self._local_start, self._local_stop = mesh.pp.rank, mesh.pp.rank + 1
        self.tied_comms: dict[str, Any] = {}
        self.forward_funcs = [stack]
        self.activation_checkpoint_interval = 0
        self.activation_checkpoint_func = None
        self.dynamic_shape = False

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Runs the stage on the output of the data loader or of the previous stage."""
        own, passed = inputs[: -self.settings.tensor_count], inputs[-self.settings.tensor_count :]
        context = self.settings.context_of(passed, backward_scale=self._hooks.backward_scale())
        hidden = self.stack(own[0] if len(own) == 1 else own, context)
        self._hooks.take_auxiliary(context.auxiliary)
        if self._is_last:
            return hidden
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # all before it is frozen, and the engine runs a backward pass from it
        return hidden, *context.tensors

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """The weights whose gradients the pipeline engine sums across stages after the last backward pass."""
        return [(weight, axis.group) for weight, axis in self._tied if not is_frozen(weight)]

    def tied_weights(self) -> list[nn.Parameter]:
        """The weights that another stage also holds."""
        return [weight for weight, _ in self._tied]

    def get_additional_losses(self) -> None:
        """None: the engine collects metrics itself."""
        return


def announce_phases(engine: Any, on_phase: Callable[[str], None]) -> None:
    """Makes one pipeline engine call `on_phase` before each instruction of its schedule."""

    def announced(phase: str, execute: Callable[..., None]) -> Callable[..., None]:
        def run(itself: Any, **arguments: Any) -> None:
            on_phase(phase)
            execute(itself, **arguments)

        return run

    engine._INSTRUCTION_MAP = {
        kind: announced(_PHASES[kind], execute) if kind in _PHASES else execute
        for kind, execute in engine._INSTRUCTION_MAP.items()
    }

"""Builds this rank's part of a network from the list of layers, initializes it, and shapes it for DeepSpeed.

Between pipeline stages only tensors are exchanged: only here is a `StepContext` turned into tensors and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from torch import nn

from megatron.engine.deepspeed_internals import BuiltStage, call_before_instructions, mark_parameter, partition_of
from megatron.engine.deepspeed_setup import quiet
from megatron.engine.freezing import freeze, is_frozen
from megatron.engine.grid import ModelParallelUnit
from megatron.engine.stages import stage_bounds
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.network import LayerSpec, LayerStack, build_layer
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.rng import draw_weights_
from megatron.parallel.shard_spec import shard_spec_of

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


class StageModule(BuiltStage):
    """A stack of layers as a `PipelineModule`.

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
        super().__init__(mesh, hooks.loss)
        self.stack = stack
        self.settings = settings
        self._hooks = hooks
        self._tied = tied
        self._is_last = mesh.is_last_stage

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


def announce_phases(engine: Any, on_phase: Callable[[str], None]) -> None:
    """Makes one pipeline engine call `on_phase` before each instruction of its schedule."""

    def announce(instruction: type) -> None:
        if instruction in _PHASES:
            on_phase(_PHASES[instruction])

    call_before_instructions(engine, announce)


def build_module(
    network: Sequence[LayerSpec],
    mesh: ParallelMesh,
    settings: Mapping[str, Any],
    steps: StepSettings,
    seed: int,
    hooks: StageHooks,
    frozen: frozenset[str] = frozenset(),
) -> nn.Module:
    """Builds and initializes this rank's part of a network: one pipeline stage, or the whole network.

    Args:
        network: the layers of the whole network.
        settings: the DeepSpeed configuration; under ZeRO-3 each layer is partitioned as soon as it is built.
        steps: settings shared by all micro-batches.
        seed: seed of the initial parameter values.
        hooks: the engine's callbacks for a pipeline stage.
        frozen: global names of the parameters that are not trained.
    """
    bounds = stage_bounds(network, mesh.pp.size)
    own = network[bounds[mesh.pp.rank] : bounds[mesh.pp.rank + 1]]
    if settings["zero_optimization"]["stage"] == 3:
        stack = _partitioned_stack(own, mesh, settings, seed)
    else:
        stack = LayerStack(own, seed=seed, initial_values=mesh.kernels.initial_values).to(steps.dtype)
    freeze(stack.parameters(), frozen)
    _mark_for_deepspeed(stack, mesh)
    if mesh.pp.size == 1:
        return stack
    return StageModule(stack, mesh, steps, hooks, _tied_weights(network, own, stack, mesh))


def _partitioned_stack(
    specs: Sequence[LayerSpec], mesh: ParallelMesh, settings: Mapping[str, Any], seed: int
) -> LayerStack:
    """Builds layer by layer under `zero.Init`: a rank holds at most one unpartitioned layer, and draws only its own
    shard.

    The dtype follows from the settings. As an argument DeepSpeed would replace it by bfloat16 on every device that
    cannot compute in float16, as many CPUs cannot.

    Source: DeepSpeed `runtime/zero/partition_parameters.py`, `_set_dtype`.
    """
    zero = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": settings["zero_optimization"],
        **{name: settings[name] for name in ("bf16", "fp16") if name in settings},
    }

    def build(spec: LayerSpec, shared: nn.Parameter | None) -> nn.Module:
        with deepspeed.zero.Init(
            data_parallel_group=mesh.gradient.group,
            config_dict_or_path=zero,
            mem_efficient_linear=False,  # it would replace torch.nn.functional.linear for the whole process
            mpu=ModelParallelUnit(mesh),
        ):
            return build_layer(spec, shared)  # a shared weight has been partitioned already

    with quiet():
        stack = LayerStack(specs, build=build)
    for parameter in stack.parameters():
        spec, part = shard_spec_of(parameter), partition_of(parameter)
        if spec.is_matrix and part is not None:
            name: str = parameter.global_name  # type: ignore[attr-defined]
            first, kernel = mesh.gradient.rank * part.numel(), mesh.kernels.initial_values
            draw_weights_(part, spec, seed, name, first=first, implementation=kernel)
    return stack


def _mark_for_deepspeed(stack: LayerStack, mesh: ParallelMesh) -> None:
    """Sets the parameter attributes that DeepSpeed reads, and sums gradients over the axes that saw different tokens.

    The sum is taken before any DeepSpeed hook sees the gradient.
    """
    for parameter in stack.parameters():
        spec = shard_spec_of(parameter)
        mark_parameter(parameter, is_counted=spec.is_counted(mesh), is_tied_copy=spec.is_tied_copy)
        for axis in () if is_frozen(parameter) else spec.summed_over:
            if axis.size > 1:
                parameter.register_hook(_summing_over(axis))


def _summing_over(axis: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), axis)

    return sum_gradient


def _tied_weights(
    network: Sequence[LayerSpec], own: Sequence[LayerSpec], stack: LayerStack, mesh: ParallelMesh
) -> list[tuple[nn.Parameter, Axis]]:
    """The weights that both this stage and another one hold, each with the axis over which its gradient is summed."""
    names = {spec.name for spec in own}
    tied: list[tuple[nn.Parameter, Axis]] = []
    for spec in network:
        here = {spec.name, spec.tied_to} & names if spec.tied_to is not None else set()
        if len(here) == 1:
            tied.append((stack.weight_of(here.pop()), mesh.embedding))
    return tied

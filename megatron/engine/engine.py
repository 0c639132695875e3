"""Training steps: one `Engine` over both DeepSpeed's plain engine and its pipeline engine.

In every layout, the loss is the sum of the token losses of the global batch divided by its number of counted tokens,
plus, for objectives with a loss per sample, their sum divided by the number of samples. DeepSpeed averages over
micro-batches and replicas, so the loss sum of a micro-batch is first multiplied by (micro-batches * replicas / counted
tokens), and the sum over samples by the same with their number.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.config import OptimConfig, PrecisionConfig
from megatron.device import GraphCapturer
from megatron.engine.cuda_graphs import MicroBatchGraphs
from megatron.engine.deepspeed_internals import view_of, whole_numel
from megatron.engine.deepspeed_setup import (
    initialize,
    join_deepspeed,
    set_learning_rate,
    set_weight_decay,
    timed_messages,
    zero_placeholder_gradients,
)
from megatron.engine.freezing import EVERYTHING_IS_TRAINED, Freezing, is_frozen
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.update_gate import StepFigures, StepVerdict, UpdateGate
from megatron.engine.micro_batch import DeviceBatch, MicroBatch
from megatron.engine.stage_build import StageHooks, StageModule, announce_phases, build_module
from megatron.engine.totals import StepResult, StepTotals
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.network import LayerSpec, LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.objective.base import Objective, Outputs
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.shard_spec import shard_spec_of


class Engine:
    """Runs forward, backward, gradient reduction, clipping and the update for one network, objective and layout.

    Args:
        network: the layers of the whole network; each rank builds only its own.
        objective: computes the loss; it may be replaced between steps.
        optim: the resolved optimizer section.
        precision: dtype and loss scaling.
        mesh: the mesh, with its process groups open.
        settings: the DeepSpeed configuration, see `ds_config.deepspeed_config`.
        steps: settings shared by all micro-batches; its dtype is the one in `precision`.
        seed: seed of the initial parameter values.
        skip_spikes: standard deviations above the recent mean from which a step is not applied; None for no limit.
        freezing: which parameters are not trained, or not since the beginning.

    Attributes:
        deepspeed: DeepSpeed's engine.
        view: the optimizer inside it.
        on_phase: called with the phase that this rank enters: forward, backward, p2p (pipelines), step or evaluation.
    """

    def __init__(
        self,
        network: Sequence[LayerSpec],
        objective: Objective,
        optim: OptimConfig,
        precision: PrecisionConfig,
        mesh: ParallelMesh,
        settings: Mapping[str, Any],
        steps: StepSettings,
        seed: int,
        skip_spikes: float | None = None,
        freezing: Freezing = EVERYTHING_IS_TRAINED,
    ) -> None:
        self.objective = objective
        self.optim = optim
        self.precision = precision
        self.mesh = mesh
        self.steps = dataclasses.replace(steps, sequence_parallel=mesh.sequence_parallel)
        self.freezing = freezing
        self._update_count = 0
        self._uncounted: deque[tuple[StepVerdict, bool]] = deque()
        self.zero_stage = int(settings["zero_optimization"]["stage"])
        self._totals = StepTotals({}, mesh.device)
        self._target_names: tuple[str, ...] = ()
        self._micro_batch_count = 1
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._is_training = True
        self._length: int | None = None
        self._graphs: MicroBatchGraphs | None = None
        join_deepspeed()
        hooks = StageHooks(self._pipeline_loss, self._backward_scale, self._take_auxiliary)
        self.module = build_module(network, mesh, settings, self.steps, seed, hooks, freezing.frozen)
        self.deepspeed = initialize(settings, optim, mesh, self.module, freezing)
        clipping = Clipping(optim.clip_grad, mesh.model, mesh.device, mesh.kernels.optimizer)
        self.view = view_of(self.deepspeed, self.zero_stage, mesh.gradient, clipping)
        if self.is_pipelined:
            announce_phases(self.deepspeed, self._enter)
        on_device = mesh.device.type == "cuda" and self.view.can_skip
        self.gate = UpdateGate(mesh, spike_deviations=skip_spikes, allows_overflow=precision.fp16, on_device=on_device)
        self.view.guard(self.gate)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The underlying torch optimizer, without DeepSpeed's wrapper."""
        return self.view.optimizer

    @property
    def update_count(self) -> int:
        """Number of optimizer updates so far, on which Adam's bias correction depends; may wait for the device."""
        self._count_updates(0)
        return self._update_count

    @update_count.setter
    def update_count(self, count: int) -> None:
        """Sets it, as a checkpoint says."""
        self._count_updates(0)
        self._update_count = count

    def _count_updates(self, keep: int) -> None:
        """Counts the steps whose update was applied, but for the latest ones."""
        while len(self._uncounted) > keep:
            verdict, skipped = self._uncounted.popleft()
            self._update_count += int(not skipped and not verdict.is_dropped)

    def before_update(self, work: Callable[[], None]) -> RemovableHandle:
        """Registers work to be done before each optimizer update; `remove()` of the result ends that.

        If the host knows in time that an update is dropped, the work is not done.
        """
        return self.optimizer.register_step_pre_hook(lambda *_: work())

    @property
    def is_pipelined(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return self.mesh.pp.size > 1

    @property
    def stack(self) -> LayerStack:
        """This rank's layers."""
        return self.module.stack if self.is_pipelined else self.module  # type: ignore[return-value]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's layers, each once, without placeholders of the optimizer."""
        return (parameter for parameter in self.stack.parameters() if hasattr(parameter, "global_name"))

    def counted_parameters(self) -> Iterator[tuple[LayerSpec, int, bool]]:
        """The layer and local size, padding included, of every parameter that this rank counts, and whether it is
        trained.

        Summed over the ranks of a model replica, the sizes give the size of the network.
        """
        counted: set[int] = set()
        for spec, layer in self.stack.named_layers():
            for parameter in layer.parameters():
                is_shared = id(parameter) in counted
                counted.add(id(parameter))
                if not is_shared and shard_spec_of(parameter).is_counted(self.mesh):
                    yield spec, whole_numel(parameter), not is_frozen(parameter)

    @property
    def loss_scale_state(self) -> dict[str, float]:
        """The dynamic loss scaler's state, for a checkpoint; empty outside fp16."""
        return self.view.loss_scale_state() if self.precision.fp16 else {}

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Restores the loss scaler's state, so that a resumed run does not search for the scale (and skip steps)
        again.
        """
        if self.precision.fp16 and self.precision.loss_scale is None:
            self.view.restore_loss_scale(state)

    def use_graphs(self, capturer: GraphCapturer) -> None:
        """Captures micro-batches as CUDA graphs from now on; see `graph_refusal` for what must hold."""
        self._graphs = MicroBatchGraphs(self.parameters(), self._forward_alone, capturer)

    def expect_length(self, length: int) -> None:
        """Tells the stages of a pipeline that the samples that follow have this many tokens: their buffers are for one
        shape.
        """
        if self.is_pipelined and self._length not in (None, length):
            self.deepspeed.reset_activation_shape()
        self._length = length

    def train_batch(
        self, micro_batches: Sequence[MicroBatch | None], learning_rate: float, weight_decay: float | None = None
    ) -> StepResult:
        """Trains one global batch.

        Args:
            micro_batches: this rank's micro-batches of the global batch, the same number on every rank; None on a
                pipeline stage that is neither the first nor the last.
            learning_rate: the learning rate of this step.
            weight_decay: the weight decay of this step; the last step's if left out.
        """
        count = len(micro_batches)
        deepspeed_samples = count * self.optim.micro_batch_size * self.mesh.gradient.size
        if deepspeed_samples != self.deepspeed.train_batch_size():
            self.deepspeed.set_train_batch_size(deepspeed_samples)
        set_learning_rate(self.optimizer, learning_rate)
        if weight_decay is not None:
            set_weight_decay(self.optimizer, weight_decay)
        batches = self._prepare(micro_batches)
        verdict = self.gate.expect(self._figures)
        if not self.module.training:
            self.module.train()
        zero_placeholder_gradients(self.module)
        with timed_messages(self.mesh.stopwatch):
            if self.is_pipelined:
                self.deepspeed.train_batch(data_iter=_pipeline_input(batches))
            else:
                self._train_plain(batches)
        skipped = self.precision.fp16 and not self.deepspeed.was_step_applied()
        self._uncounted.append((verdict, skipped))
        self._count_updates(self.gate.steps_in_flight)
        return StepResult(
            self._totals.over_ranks(self.mesh),
            self.objective.metric_sizes,
            gradient_norm=self.view.norm(),
            sample_count=count * self.optim.micro_batch_size * self.mesh.batch.size,
            skipped=skipped,
            verdict=verdict,
            loss_scale=self._loss_scale(),
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch | None]) -> tuple[float, float]:
        """Returns (sum of the token losses, counted tokens) of one global batch, equal on all ranks, without
        training.
        """
        loss_sum, tokens = self._evaluated(micro_batches)[:2].tolist()
        return loss_sum, tokens

    def measure(self, micro_batches: Sequence[MicroBatch | None], objective: Objective) -> dict[str, torch.Tensor]:
        """The metrics of another objective over one global batch, equal on all ranks, without training.

        The micro-batches of a call have the same shape, which may differ from the shape in training.

        Shapes: each metric `[n]` float64, on the CPU, with the `n` of `Objective.metric_sizes`.
        """
        own, self.objective = self.objective, objective
        split, whole = self.steps, dataclasses.replace(self.steps, sequence_parallel=Axis.single("tp"))
        try:
            self._use(whole)  # ranks could not share the tokens of any length
            if self.is_pipelined:
                self.deepspeed.reset_activation_shape()
            sums = self._evaluated(micro_batches)[2:].cpu()
        finally:
            self.objective = own
            self._use(split)
            if self.is_pipelined:
                self.deepspeed.reset_activation_shape()
        sizes = objective.metric_sizes
        return dict(zip(sizes, sums.split(list(sizes.values())), strict=True))

    def _use(self, steps: StepSettings) -> None:
        self.steps = steps
        if isinstance(self.module, StageModule):
            self.module.settings = steps

    def _evaluated(self, micro_batches: Sequence[MicroBatch | None]) -> torch.Tensor:
        """The sums of one global batch, see `StepTotals.over_ranks`."""
        self._is_training = False
        batches = self._prepare(micro_batches)
        if self.is_pipelined:
            self.deepspeed.eval_batch(_pipeline_input(batches), num_micro_batches=len(batches))
        else:
            self.module.eval()
            with torch.no_grad():
                for batch in batches:
                    self._plain_loss(batch)
        self.module.train()
        self._is_training = True
        return self._totals.over_ranks(self.mesh)

    def _prepare(self, micro_batches: Sequence[MicroBatch | None]) -> list[DeviceBatch]:
        """Resets the totals and copies to the device what this stage needs of the micro-batches, without
        synchronizing.
        """
        mesh = self.mesh
        self._micro_batch_count = len(micro_batches)
        self._totals = StepTotals(self.objective.metric_sizes, mesh.device)
        read = [batch for batch in micro_batches if batch is not None]
        scales = torch.ones(2, device=mesh.device)
        if mesh.is_last_stage:
            tokens = sum(self.objective.token_count(batch) for batch in read)
            counted = torch.tensor([tokens, sum(len(batch.sample_ids) for batch in read)], dtype=torch.float64)
            counted = all_reduce_sum(counted.to(mesh.device, non_blocking=True), mesh.loss)
            divisors = torch.where(counted > 0, counted, 1.0)  # without a counted token there is nothing to divide
            scales = (len(read) * mesh.gradient.size / divisors).to(torch.float32)
        batches = [
            DeviceBatch.of(
                batch,
                self.objective,
                self.steps,
                scales,
                with_inputs=mesh.is_first_stage,
                with_targets=mesh.is_last_stage,
            )
            for batch in read
        ]
        self._target_names = batches[0].target_names if batches else ()
        return batches or [DeviceBatch.nothing()] * len(micro_batches)

    def _train_plain(self, batches: Sequence[DeviceBatch]) -> None:
        for number, batch in enumerate(batches, start=1):
            # DeepSpeed's own micro-batch count is wrong after the batch size has changed.
            self.deepspeed.set_gradient_accumulation_boundary(number == len(batches))
            loss = self._plain_loss(batch) if self._graphs is None else self._graphed_loss(batch, self._graphs)
            self._enter("backward")
            self.deepspeed.backward(loss)
            self._enter("step")
            self.deepspeed.step()

    def _enter(self, phase: str) -> None:
        self.on_phase(phase if self._is_training else "evaluation")

    def _plain_loss(self, batch: DeviceBatch) -> torch.Tensor:
        self._enter("forward")
        context = batch.context(self.steps, self._backward_scale())
        outputs = self.deepspeed(batch.network_input, context)
        return self._loss(outputs, batch.targets, context.auxiliary.sums())

    def _graphed_loss(self, batch: DeviceBatch, graphs: MicroBatchGraphs) -> torch.Tensor:
        """The loss of a micro-batch whose gradients the parameters have already, so that its backward is empty."""
        self._enter("forward")
        count = self._micro_batch_count
        outcome = graphs.run(batch, (count, batch.target_names, self.steps, id(self.objective)))
        graphs.give(outcome, adds_up=self.view.is_direct and count > 1)
        self._totals.add_sums(outcome.sums)
        return outcome.loss.detach().requires_grad_().view(())  # DeepSpeed asks what it was computed by

    def _forward_alone(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch as its backward pass begins with it, and its own totals, without DeepSpeed."""
        totals, self._totals = self._totals, StepTotals(self.objective.metric_sizes, self.mesh.device)
        try:
            context = batch.context(self.steps, self._backward_scale())
            loss = self._loss(self.stack(batch.network_input, context), batch.targets, context.auxiliary.sums())
            return loss * self._backward_scale(), self._totals.sums
        finally:
            self._totals = totals

    def _pipeline_loss(self, outputs: Outputs, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._loss(outputs, targets, {})  # each stage reports its own auxiliary losses

    def _loss(
        self, outputs: Outputs, targets: tuple[torch.Tensor, ...], auxiliary: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        scales, *tensors = targets
        named = dict(zip(self._target_names, tensors, strict=True))
        result = self.objective(outputs, named, scales[0] * self._backward_scale())
        self._totals.add(result, auxiliary)
        loss = (result.loss_sum if result.minimized_sum is None else result.minimized_sum) * scales[0]
        return loss if result.sample_sum is None else loss + result.sample_sum * scales[1]

    def _take_auxiliary(self, losses: AuxiliaryLosses) -> None:
        self._totals.add_auxiliary(losses.sums())

    def _figures(self) -> StepFigures:
        """What the step is judged by, when its gradients are complete."""
        loss_sum, tokens = self._totals.over_ranks(self.mesh)[:2]
        norm = torch.as_tensor(self.view.norm(), dtype=torch.float64, device=self.mesh.device)
        return StepFigures(torch.where(tokens > 0, loss_sum / tokens, loss_sum), norm.reshape(()), tokens)

    def _loss_scale(self) -> float:
        return self.view.loss_scale() if self.precision.fp16 else 1.0

    def _backward_scale(self) -> float:
        """The factor by which DeepSpeed multiplies the loss of a micro-batch before backward."""
        return self._loss_scale() / self._micro_batch_count


def _pipeline_input(
    batches: Sequence[DeviceBatch],
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Micro-batches in the form that DeepSpeed's pipeline engine expects."""
    return iter([((*batch.inputs, *batch.passed), batch.targets) for batch in batches])

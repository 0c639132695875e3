"""Training steps: one `Engine` over DeepSpeed's plain engine, with or without a pipeline, and its pipeline engine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.config import PrecisionConfig
from megatron.device import GraphCapturer
from megatron.engine.deepspeed_internals.optimizer_views import view_of
from megatron.engine.deepspeed_internals.parameters import is_measured, whole_numel
from megatron.engine.deepspeed_setup import (
    initialize,
    join_deepspeed,
    set_learning_rate,
    set_weight_decay,
    timed_messages,
)
from megatron.engine.freezing import EVERYTHING_IS_TRAINED, Freezing, is_frozen
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.finite_check import FiniteCheck
from megatron.engine.gradients.gradient_figures import GradientFigures
from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.update_gate import StepVerdict, UpdateGate
from megatron.engine.micro_batch import DeviceBatch, MicroBatch
from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.engine.passes.plain import Passes, PlainPasses
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import tied_weights
from megatron.engine.pipeline.deepspeed_pipeline import DeepSpeedPasses, StageModule
from megatron.engine.pipeline.executor import Executor
from megatron.engine.pipeline.passes import ONE_FORWARD_ONE_BACKWARD, PipelinePasses, PipelineSettings
from megatron.engine.stage_build import build_stack, partial_parameters, sum_in_backward
from megatron.engine.tensor_parts import is_block_matrix
from megatron.engine.totals import StepResult
from megatron.model.interface.network import LayerSpec
from megatron.model.interface.step_context import StepSettings
from megatron.model.interface.step_state import StepState
from megatron.objective.base import Objective
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.weight_gradients import AddProduct, add_by_product


class Engine:
    """Runs forward, backward, gradient reduction, clipping and the update for one network, objective and layout.

    Args:
        network: the layers of the whole network; each rank builds only its own.
        objective: computes the loss; it may be replaced between steps.
        plan: which optimizer is built, and how.
        precision: dtype and loss scaling.
        mesh: the mesh, with its process groups open.
        settings: the DeepSpeed configuration, see `ds_config.deepspeed_config`.
        steps: settings shared by all micro-batches; its dtype is the one in `precision`.
        seed: seed of the initial parameter values.
        skip_spikes: standard deviations above the recent mean from which a step is not applied; None for no limit.
        freezing: which parameters are not trained, or not since the beginning.
        pipeline: how the layers are divided over the ranks of a pipeline.
        measures: what is measured of gradients, see `GradientFigures`; nothing can be with ZeRO 3.
        checks_own: whether each rank looks for NaN and infinity in its loss and gradients before they are summed over
            ranks; with ZeRO 3, in its loss.

    Attributes:
        stack: this rank's layers, of all its chunks.
        tied: the weights that other ranks of the pipeline hold as well, each with the axis of these ranks.
        placement: of the chunks that a schedule of our own runs; None if there is none.
        deepspeed: DeepSpeed's engine.
        view: the optimizer inside it.
        averages: means of the weights that are trained; None if there are none.
        layer_names: global names of the layers of the whole network, in order.
        on_phase: called with the phase that this rank enters: forward, backward, p2p (pipelines), step or evaluation.
    """

    def __init__(
        self,
        network: Sequence[LayerSpec],
        objective: Objective,
        plan: OptimizerPlan[Any],
        precision: PrecisionConfig,
        mesh: ParallelMesh,
        settings: Mapping[str, Any],
        steps: StepSettings,
        seed: int,
        skip_spikes: float | None = None,
        freezing: Freezing = EVERYTHING_IS_TRAINED,
        pipeline: PipelineSettings = ONE_FORWARD_ONE_BACKWARD,
        measures: Collection[str] = (),
        checks_own: bool = False,
    ) -> None:
        self.objective = objective
        self.plan = plan
        self.precision = precision
        self.mesh = mesh
        self.steps = dataclasses.replace(steps, sequence_parallel=mesh.sequence_parallel)
        self.freezing = freezing
        self._update_count = 0
        self._averaging_weight = 0.0
        self._uncounted: deque[tuple[StepVerdict, float]] = deque()
        self._before_changes: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self.zero_stage = int(settings["zero_optimization"]["stage"])
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._is_training = True
        join_deepspeed()
        self.layer_names = tuple(spec.name for spec in network)
        self.chunks = pipeline.chunks(network, mesh.pp, freezing.frozen)
        self.stack = build_stack(self.chunks.specs, mesh, settings, steps.dtype, seed, freezing.frozen)
        self._states = [module for module in self.stack.modules() if isinstance(module, StepState)]
        self.tied = tied_weights(network, self.stack, mesh)
        by_deepspeed = pipeline.by_deepspeed and mesh.pp.size > 1
        self.module: nn.Module = StageModule(self.stack, mesh) if by_deepspeed else self.stack
        self.deepspeed = initialize(settings, plan, mesh, self.module, freezing, [weight for weight, _ in self.tied])
        clipping = Clipping(plan.optim.clip_grad, mesh.model, mesh.device, mesh.kernels.optimizer)
        self.view = view_of(self.deepspeed, self.zero_stage, mesh, clipping)
        trained = [parameter for parameter in self.parameters() if not is_frozen(parameter)]
        plan.connect(self.optimizer, trained, self.view.slice_of, mesh)
        self.optimizer.register_step_pre_hook(lambda *_: self._prepare_change())
        self.averages = plan.averages(self.optimizer, self.view.masters())
        self._losses = StepLoss(objective, self.steps, mesh, 1.0, 1)
        self._passes = self._build_passes(pipeline)
        self.placement = pipeline.placement(mesh.pp.size) if isinstance(self._passes, PipelinePasses) else None
        on_device = mesh.device.type == "cuda" and self.view.can_skip
        self.gate = UpdateGate(mesh, spike_deviations=skip_spikes, allows_overflow=precision.fp16, on_device=on_device)
        self.view.guard(self.gate)
        self._gradient_figures = self._build_figures(measures)
        self._checks_own = checks_own

    def _build_figures(self, measures: Collection[str]) -> GradientFigures | None:
        if not measures or not isinstance(self.view, GradientOwner):
            return None
        matrices = [
            parameter
            for parameter in self.parameters()
            if is_block_matrix(parameter)
            and is_measured(parameter)
            and not shard_spec_of(parameter).summed_over
            and ".experts." not in parameter.global_name  # type: ignore[attr-defined]
        ]
        return GradientFigures(self.layer_names, measures, self.view, matrices, self.mesh)

    def _build_passes(self, pipeline: PipelineSettings) -> Passes:
        gradients, partial = self.view if isinstance(self.view, GradientOwner) else None, partial_parameters(self.stack)
        if gradients is None or isinstance(self.module, StageModule):
            sum_in_backward(partial)
        else:
            gradients.sum_partial(partial)
        if gradients is not None:
            gradients.sum_tied([(weight, axis) for weight, axis in self.tied if not is_frozen(weight)])
        if isinstance(self.module, StageModule):
            return DeepSpeedPasses(self.deepspeed, self.module, self._enter)
        if gradients is None or self.chunks.count == 1:
            return PlainPasses(self.deepspeed, self.stack, gradients, self._enter, adds_up=self.view.is_direct)
        runner = ChunkRunner(self.stack, self.chunks, splits_backward=pipeline.splits_backward)
        executor = Executor(runner, self.mesh.pp, self.mesh.world, gradients.accumulate, self._enter)
        return PipelinePasses(executor, pipeline, gradients, self.deepspeed, self._enter)

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

    @property
    def averaging_weight(self) -> float:
        """The sum of `OptimizerPlan.weight_of` over the updates so far; may wait for the device as well."""
        self._count_updates(0)
        return self._averaging_weight

    @averaging_weight.setter
    def averaging_weight(self, weight: float) -> None:
        """Sets it, as a checkpoint says."""
        self._count_updates(0)
        self._averaging_weight = weight

    def _count_updates(self, keep: int) -> None:
        """Counts the steps whose update was applied, but for the latest ones."""
        while len(self._uncounted) > keep:
            verdict, weight = self._uncounted.popleft()
            if not verdict.is_dropped:
                self._update_count += 1
                self._averaging_weight += weight

    def before_update(self, work: Callable[[], None]) -> RemovableHandle:
        """Registers work to be done before each optimizer update; `remove()` of the result ends that.

        If the host knows in time that an update is dropped, the work is not done then, but before the weights are
        exchanged for their means.
        """
        handle = RemovableHandle(self._before_changes)
        self._before_changes[handle.id] = work
        return handle

    def _prepare_change(self) -> None:
        for work in self._before_changes.values():
            work()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's layers, each once, without a placeholder of the optimizer."""
        return (parameter for parameter in self.stack.parameters() if hasattr(parameter, "global_name"))

    def counted_parameters(self) -> Iterator[tuple[LayerSpec, int, bool]]:
        """The layer and local size, padding included, of every parameter that this rank counts, and whether it is
        trained. Of experts it counts those of the ranks with other ones, too.

        Summed over the ranks of a model replica, the sizes give the size of the network.
        """
        counted: set[int] = set()
        for spec, layer in self.stack.named_layers():
            for parameter in layer.parameters():
                is_shared = id(parameter) in counted
                counted.add(id(parameter))
                if not is_shared and shard_spec_of(parameter).is_counted(self.mesh):
                    yield spec, whole_numel(parameter) * self._shards(parameter), not is_frozen(parameter)

    def _shards(self, parameter: nn.Parameter) -> int:
        """How many shards of a parameter this rank counts: its own, and of experts the other ranks'."""
        if self.mesh.ep.name not in shard_spec_of(parameter).split_axes:
            return 1
        return self.mesh.ep.size if self.mesh.experts.keeps_tensor or self.mesh.tp.rank == 0 else 0

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

    @property
    def product_adder(self) -> AddProduct | None:
        """What adds gradients of weights to their sums as products; None if nothing does."""
        if not isinstance(self.view, GradientOwner) or isinstance(self.module, StageModule):
            return None
        return self.view.product_adder(self.steps.dtype)

    def fuse_accumulation(self) -> None:
        """Has the products that compute gradients of large weights add to their sums from now on, if they can."""
        if self.product_adder is not None:
            add_by_product(self.stack.modules(), self.product_adder)

    def use_graphs(self, capturer: GraphCapturer) -> None:
        """Captures micro-batches, or passes of a pipeline's chunks, as CUDA graphs from now on; see `graph_refusal` for
        what must hold.
        """
        if isinstance(self._passes, PlainPasses):
            self._passes.use_graphs(capturer)
        elif isinstance(self._passes, PipelinePasses):
            self._passes.use_graphs(capturer, adds_up=self.view.is_direct)

    def train_batch(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, weight_decay: float | None = None
    ) -> StepResult:
        """Trains one global batch.

        Args:
            micro_batches: this rank's micro-batches of the global batch, the same number on every rank.
            learning_rate: the learning rate of this step.
            weight_decay: the weight decay of this step; the last step's if left out.
        """
        count = len(micro_batches)
        deepspeed_samples = count * self.plan.optim.micro_batch_size * self.mesh.gradient.size
        if deepspeed_samples != self.deepspeed.train_batch_size():
            self.deepspeed.set_train_batch_size(deepspeed_samples)
        set_learning_rate(self.optimizer, learning_rate)
        if weight_decay is not None:
            set_weight_decay(self.optimizer, weight_decay)
        batches = self._prepare(micro_batches)
        verdict = self.gate.expect(self._figures)
        self._finite_check = FiniteCheck() if self._checks_own else None
        if self._finite_check is not None and isinstance(self.view, GradientOwner):
            self.view.look_at_own(self._finite_check.look)
        if not self.module.training:
            self.module.train()
        with timed_messages(self.mesh.stopwatch):
            self._passes.train(batches, self._losses)
        self._update_states()
        if self.averages is not None:
            self.averages.update(self.gate.is_applied())
        self._uncounted.append((verdict, self.plan.weight_of(self.optimizer, learning_rate)))
        self._count_updates(self.gate.steps_in_flight)
        return StepResult(
            self._step_figures,
            self.objective,
            sample_count=count * self.plan.optim.micro_batch_size * self.mesh.batch.size,
            micro_batch_size=self.plan.optim.micro_batch_size,
            verdict=verdict,
            loss_scale=self._loss_scale(),
            gradients=self._gradient_figures,
            finite_check=self._finite_check,
        )

    def _update_states(self) -> None:
        """Updates what no gradient trains."""
        if self._states:
            totals, is_applied = self._losses.totals.by_name(self.mesh), self.gate.is_applied()
            for state in self._states:
                state.after_step(totals, is_applied)

    @contextlib.contextmanager
    def using_averages(self) -> Iterator[None]:
        """Has the network compute with the means of its weights in the block, if there are any; collective.

        Nothing is trained or saved in it. Afterwards every weight is what it was, bit by bit.
        """
        if self.averages is None:
            yield
            return
        self._prepare_change()  # a dropped update has not waited for a copy of the weights
        self.averages.exchange()
        self.view.refresh_weights()
        try:
            yield
        finally:
            self.averages.exchange()
            self.view.refresh_weights()

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Returns (sum of the token losses, counted tokens) of one global batch, equal on all ranks, without
        training.
        """
        loss_sum, tokens = self._evaluated(micro_batches)[:2].tolist()
        return loss_sum, tokens

    def measure(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> dict[str, torch.Tensor]:
        """The sums that another objective records over one global batch, equal on all ranks, without training.

        The micro-batches of a call have the same shape, which may differ from the shape in training, and no rank shares
        its samples with another: every rank of `mesh.loss` is given its own. Experts drop no tokens, so that no sample
        depends on the others.

        Shapes: each `[n]` float64, on the CPU, with the `n` of `sum_sizes`.
        """
        own, self.objective = self.objective, objective
        alone = Axis.single("tp")
        steps = self.steps
        try:  # ranks could not share the tokens of any length
            self.steps = dataclasses.replace(steps, split=None, sequence_parallel=alone, drops_tokens=False)
            self._evaluated(micro_batches)
        finally:
            self.objective, self.steps = own, steps
        return {name: sums.cpu() for name, sums in self._losses.totals.by_name(self.mesh).items()}

    def _evaluated(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The sums of one global batch, see `StepTotals.over_ranks`."""
        self._is_training = False
        batches = self._prepare(micro_batches)
        self.module.eval()
        self._passes.evaluate(batches, self._losses)
        self.module.train()
        self._is_training = True
        return self._losses.totals.over_ranks(self.mesh)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> list[DeviceBatch]:
        """Begins a global batch with new totals."""
        self._losses = StepLoss(self.objective, self.steps, self.mesh, self._loss_scale(), len(micro_batches))
        has_first, has_last = self.chunks.has_first, self.chunks.has_last
        return self._losses.prepare(micro_batches, with_inputs=has_first, with_targets=has_last)

    def _enter(self, phase: str) -> None:
        self.on_phase(phase if self._is_training else "evaluation")

    def _figures(self) -> torch.Tensor:
        """What the step is judged by, when its gradients are complete: see `UpdateGate.expect`."""
        norm = torch.as_tensor(self.view.norm(), dtype=torch.float64, device=self.mesh.device)
        totals, check = self._losses.totals, self._finite_check
        wrong = None if check is None else check.is_wrong(totals.sums[:1])
        figures = [norm.reshape(1), totals.over_ranks(self.mesh)]
        if self._gradient_figures is not None:
            figures.append(self._gradient_figures.measure(self._losses.micro_batches, self._loss_scale()))
        self._step_figures = torch.cat(figures)
        judged = self._step_figures if len(self._step_figures) == 3 else self._step_figures[:3]
        return judged if wrong is None else judged.masked_fill(wrong, math.nan)  # also copies that the norm leaves out

    def _loss_scale(self) -> float | torch.Tensor:
        return self.view.loss_scale() if self.precision.fp16 else 1.0

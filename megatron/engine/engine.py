"""The `Engine`: training steps for all layouts and optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.deepspeed_internals.optimizer_views import view_of
from megatron.engine.deepspeed_setup import initialize, join_deepspeed, set_rates, timed_messages
from megatron.engine.ds_config import buckets_of
from megatron.engine.freezing import NOTHING_FROZEN, FreezeSpec, is_frozen
from megatron.engine.gradients.finite_check import FiniteCheck
from megatron.engine.gradients.update_gate import NO_CHECKS, StepChecks, UpdateCount, UpdateGate
from megatron.engine.micro_batch import DeviceBatch, MicroBatch
from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.pipeline.passes import ONE_FORWARD_ONE_BACKWARD, PipelineSettings
from megatron.engine.stage_build import build_stack, partial_parameters, tied_weights
from megatron.engine.totals import StepResult
from megatron.model.interface.network import LayerSpec
from megatron.model.interface.step_context import StepSettings
from megatron.model.interface.step_state import step_states
from megatron.objective.base import Objective
from megatron.parallel.mesh import Axis, ParallelMesh


class Engine:
    """Runs forward, backward, gradient reduction, clipping and the update for one network, objective and layout.

    Args:
        network: the layers of the whole network; each rank builds only its own.
        objective: computes the loss; it may be replaced between steps.
        plan: builds the optimizer.
        mesh: the mesh, with initialized process groups.
        settings: the DeepSpeed configuration, see `ds_config.deepspeed_config`.
        steps: settings shared by all micro-batches.
        seed: seed of the initial parameter values.
        freezing: the parameters that are frozen, or were frozen earlier.
        pipeline: the division of the layers over the ranks of a pipeline.
        checks: checks of every step; with ZeRO 3, gradients are not checked.
        buckets: of data-parallel messages, with ZeRO 0 to 2; those of `settings` by default.

    Attributes:
        stack: this rank's layers, of all its chunks.
        tied: the weights that other stages hold as well, each with the axis of these stages.
        passes: runs micro-batches through the layers.
        module: the module that DeepSpeed was initialized with.
        deepspeed: DeepSpeed's engine.
        view: the optimizer inside it.
        averages: averaged weights; None if none are kept.
        layer_names: global names of the layers of the whole network, in order.
        on_phase: called with the phase that this rank enters: forward, backward, p2p (pipelines), step or evaluation.
    """

    def __init__(
        self,
        network: Sequence[LayerSpec],
        objective: Objective,
        plan: OptimizerPlan[Any],
        mesh: ParallelMesh,
        settings: Mapping[str, Any],
        steps: StepSettings,
        seed: int,
        freezing: FreezeSpec = NOTHING_FROZEN,
        pipeline: PipelineSettings = ONE_FORWARD_ONE_BACKWARD,
        checks: StepChecks = NO_CHECKS,
        buckets: Buckets | None = None,
    ) -> None:
        self.objective, self.plan, self.mesh, self.freezing = objective, plan, mesh, freezing
        self.steps = dataclasses.replace(steps, sequence_parallel=mesh.sequence_parallel)
        self.zero_stage = int(settings["zero_optimization"]["stage"])
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._is_training = True
        self._count = UpdateCount()
        self._before_changes: list[Callable[[], None]] = []
        join_deepspeed()
        self.layer_names = tuple(spec.name for spec in network)
        self.chunks = pipeline.chunks(network, mesh.pp, freezing.frozen)
        self.stack = build_stack(self.chunks.specs, mesh, settings, steps.dtype, seed, freezing.frozen)
        self._states = list(step_states(self.stack))
        self.tied = tied_weights(network, self.stack, mesh)
        self.passes = pipeline.passes(self.stack, self.chunks, mesh, self.zero_stage)
        self.module: nn.Module = self.passes.module
        tied_here, chunks = [weight for weight, _ in self.tied], self.chunks.numbers(self.stack)
        buckets = buckets or buckets_of(settings, mesh.gradient.size)
        self.deepspeed = initialize(settings, plan, mesh, self.module, freezing, buckets, tied_here, chunks)
        self.view = view_of(
            self.deepspeed, self.zero_stage, mesh, plan.optim.clip_grad, buckets, self.module.parameters()
        )
        self.stack.before_layer = self.view.await_weights
        trained = [parameter for parameter in self.parameters() if not is_frozen(parameter)]
        plan.connect(self.optimizer, trained, self.view.slice_of, mesh)
        self.optimizer.register_step_pre_hook(lambda *_: self._prepare_change())
        self.averages = plan.averages(self.optimizer, self.view.masters())
        self._losses = StepLoss(objective, self.steps, mesh, 1.0, 1)
        tied = [(weight, axis) for weight, axis in self.tied if not is_frozen(weight)]
        self.passes.connect(self.deepspeed, self.view, partial_parameters(self.stack), tied, self._enter)
        self.gate = UpdateGate(
            mesh,
            spike_deviations=checks.skip_spikes,
            allows_overflow=self.view.is_scaled,
            on_device=mesh.device.type == "cuda" and self.view.can_skip,
        )
        self.view.guard(self.gate)
        self._gradient_stats = self.view.gradient_stats(self.layer_names, checks.measures, trained, mesh)
        self._locates_nonfinite = checks.locates_nonfinite

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The underlying torch optimizer, without DeepSpeed's wrapper."""
        return self.view.optimizer

    @property
    def update_count(self) -> int:
        """Number of optimizer updates so far, for Adam's bias correction; may wait for the device."""
        return self._count.read()[0]

    @property
    def averaging_weight(self) -> float:
        """The sum of `OptimizerPlan.weight_of` over the updates so far; may wait for the device."""
        return self._count.read()[1]

    def restart_count(self, updates: int, averaging_weight: float) -> None:
        """Sets `update_count` and `averaging_weight` to the values of a checkpoint."""
        self._count.restart(updates, averaging_weight)

    def before_update(self, work: Callable[[], None]) -> None:
        """Registers work to be done before each optimizer update, and before `using_averages` exchanges the weights.

        The work is not done for an update that the host knows in time to be skipped.
        """
        self._before_changes.append(work)

    def _prepare_change(self) -> None:
        for work in self._before_changes:
            work()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's layers, each once, without the optimizer's placeholder."""
        self.view.await_weights()
        return (parameter for parameter in self.stack.parameters() if hasattr(parameter, "global_name"))

    def train_batch(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, weight_decay: float | None = None
    ) -> StepResult:
        """Trains one global batch.

        Args:
            micro_batches: this rank's micro-batches of the global batch, the same number on every rank.
            learning_rate: the learning rate of this step.
            weight_decay: the weight decay of this step; None keeps the previous one.
        """
        count = len(micro_batches)
        deepspeed_samples = count * self.plan.optim.micro_batch_size * self.mesh.gradient.size
        if deepspeed_samples != self.deepspeed.train_batch_size():
            self.deepspeed.set_train_batch_size(deepspeed_samples)
        set_rates(self.optimizer, learning_rate, weight_decay)
        batches = self._prepare(micro_batches)
        verdict = self.gate.begin(self._measure_step)
        self._finite_check = FiniteCheck() if self._locates_nonfinite else None
        if self._finite_check is not None:
            self.view.set_before_reduce(self._finite_check.record)
        if not self.module.training:
            self.module.train()
        with timed_messages(self.mesh.stopwatch):
            self.passes.train(batches, self._losses)
        self._update_states()
        if self.averages is not None:
            self.averages.update(self.gate.is_applied())
        self._count.add(verdict, self.plan.weight_of(self.optimizer, learning_rate), self.gate.steps_in_flight)
        return StepResult(
            self._step_values,
            self.objective,
            sample_count=count * self.plan.optim.micro_batch_size * self.mesh.batch.size,
            micro_batch_size=self.plan.optim.micro_batch_size,
            verdict=verdict,
            loss_scale=self.view.loss_scale(),
            gradients=self._gradient_stats,
            finite_check=self._finite_check,
        )

    def _update_states(self) -> None:
        if self._states:
            totals, is_applied = self._losses.totals.by_name(self.mesh), self.gate.is_applied()
            for state in self._states:
                state.after_step(totals, is_applied)

    @contextlib.contextmanager
    def using_averages(self) -> Iterator[None]:
        """Makes the network compute with its averaged weights in the block, if there are any; collective.

        Training and saving are not allowed in the block. Afterwards all weights are restored bit by bit.
        """
        if self.averages is None:
            yield
            return
        self._prepare_change()  # a skipped update has not done this
        self.view.await_weights()
        self.averages.exchange()
        self.view.refresh_weights()
        try:
            yield
        finally:
            self.view.await_weights()
            self.averages.exchange()
            self.view.refresh_weights()

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Returns (sum of the token losses, counted tokens) of one global batch, equal on all ranks."""
        loss_sum, tokens = self._evaluate(micro_batches)[:2].tolist()
        return loss_sum, tokens

    def measure(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> dict[str, torch.Tensor]:
        """Evaluates another objective on one global batch and returns its sums by name, equal on all ranks.

        All micro-batches have the same shape, of any length, so sequences are not split: every rank of `mesh.loss`
        passes different samples. Experts drop no tokens, so that samples are independent of each other.

        Shapes: each `[n]` float64, on the CPU, with the `n` of `sum_sizes`.
        """
        saved_objective, saved_steps = self.objective, self.steps
        try:
            self.objective = objective
            self.steps = dataclasses.replace(
                saved_steps, split=None, sequence_parallel=Axis.single("tp"), drops_tokens=False
            )
            self._evaluate(micro_batches)
        finally:
            self.objective, self.steps = saved_objective, saved_steps
        return {name: sums.cpu() for name, sums in self._losses.totals.by_name(self.mesh).items()}

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Returns `StepTotals.over_ranks` of one global batch."""
        self._is_training = False
        batches = self._prepare(micro_batches)
        self.module.eval()
        self.passes.evaluate(batches, self._losses)
        self.module.train()
        self._is_training = True
        return self._losses.totals.over_ranks(self.mesh)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> list[DeviceBatch]:
        self._losses = StepLoss(self.objective, self.steps, self.mesh, self.view.loss_scale(), len(micro_batches))
        has_first, has_last = self.chunks.has_first, self.chunks.has_last
        return self._losses.prepare(micro_batches, with_inputs=has_first, with_targets=has_last)

    def _enter(self, phase: str) -> None:
        self.on_phase(phase if self._is_training else "evaluation")

    def _measure_step(self) -> torch.Tensor:
        """Measures the step once its gradients are complete; returns the values for `UpdateGate.begin`."""
        norm = torch.as_tensor(self.view.norm(), dtype=torch.float64, device=self.mesh.device)
        totals, check = self._losses.totals, self._finite_check
        is_wrong = None if check is None else check.is_wrong(totals.sums[:1])
        values = [norm.reshape(1), totals.over_ranks(self.mesh)]
        if self._gradient_stats is not None:
            values.append(self._gradient_stats.measure(self._losses.micro_batches, self.view.loss_scale()))
        self._step_values = torch.cat(values)
        judged = self._step_values if len(self._step_values) == 3 else self._step_values[:3]
        # The check also covers copies that the norm does not count.
        return judged if is_wrong is None else judged.masked_fill(is_wrong, math.nan)

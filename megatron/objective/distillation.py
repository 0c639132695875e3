"""Distillation: besides the labels, a network learns the distribution that a trained one, its teacher, predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.objective.base import ObjectiveResult
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.tensor.divergence import vocab_parallel_divergences

DISTILLATION_LOSS = "distillation_loss"
_PREFIX = "teacher_"


@dataclass(frozen=True)
class Teacher:
    """A trained network that stays as it is.

    It runs as a whole wherever losses are computed, on the last pipeline stage, split over the tensor-parallel ranks as
    the network that is trained. No engine knows it, so nothing of it is optimized, partitioned or saved.

    Args:
        network: all its layers, in evaluation mode, without gradients.
        steps: the settings of its contexts; what a token attends to is set as in the run.
    """

    network: LayerStack
    steps: StepSettings

    def inputs(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """What it reads of a micro-batch: the tokens, and what its context is built from."""
        names = ("tokens", "sample_ids", *self.steps.passed)
        return {_PREFIX + name: getattr(batch, name) for name in names}

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its logits for what `inputs` named. Shapes: `[b, s, v/t]`."""
        context = self.steps.context_of([inputs[_PREFIX + name] for name in ("sample_ids", *self.steps.passed)])
        return self.network(inputs[_PREFIX + "tokens"], context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DistillationObjective:
    """a L + b T^2 KL(teacher || student): L is what the student minimizes by itself.

    The divergence of the two distributions is taken at temperature T, per token, and tokens count in it as in L; the
    factor T^2 keeps the gradients of both parts in proportion when T changes. The loss that is reported is the plain
    cross-entropy, as without a teacher; b T^2 KL is a metric of its own. Without gradients, as in evaluation, the
    teacher is not asked.

    Args:
        student: the objective without a teacher.
        teacher: None on pipeline stages that compute no loss.
        label_weight: a.
        teacher_weight: b.
        temperature: T.

    Source: Hinton et al., "Distilling the knowledge in a neural network", 2015; deepspeedai Megatron-DeepSpeed
    `pretrain_gpt.py`, `calculate_mos_loss`, whose weight a is read and not used, and whose softmax is over a rank's own
    part of a split vocabulary.
    """

    student: LanguageModelObjective
    teacher: Teacher | None
    label_weight: float = 1.0
    teacher_weight: float = 1.0
    temperature: float = 1.0

    @property
    def metric_sizes(self) -> Mapping[str, int]:
        """The student's metrics; the sum of the second part and what it is divided by, tokens or samples."""
        return {**self.student.metric_sizes, DISTILLATION_LOSS: 2}

    def inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """The student's inputs."""
        return self.student.inputs(batch)

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The student's targets, and what the teacher reads."""
        return {**self.student.targets(batch), **(self.teacher.inputs(batch) if self.teacher is not None else {})}

    def token_count(self, batch: Batch) -> float:
        """The student's token count."""
        return self.student.token_count(batch)

    def __call__(
        self, outputs: torch.Tensor, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        """Adds the divergence from the teacher.

        Shapes: outputs (logits) `[b, s, v/t]`; targets as for the student.
        """
        result = self.student(outputs, targets, factor)
        if self.teacher is None or not torch.is_grad_enabled():
            return result
        divergences = vocab_parallel_divergences(
            outputs,
            self.teacher.logits(targets),
            self.student.axis,
            self.student.vocab_size,
            temperature=self.temperature,
        )
        weights = self.student.token_weights(targets)
        mask = targets["loss_mask"] if weights is None else targets["loss_mask"] * weights
        added = self.teacher_weight * self.temperature**2 * (divergences * mask).sum()
        own = result.loss_sum if result.minimized_sum is None else result.minimized_sum
        return dataclasses.replace(
            result,
            loss_sum=result.loss_sum.detach(),
            minimized_sum=self.label_weight * own + added,
            metrics={**result.metrics, DISTILLATION_LOSS: torch.stack([added.detach(), mask.sum()])},
        )

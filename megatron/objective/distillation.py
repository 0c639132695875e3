"""Distillation: besides the labels, a network learns the distribution that a trained one, its teacher, predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.objective.base import ObjectiveResult
from megatron.objective.language_model import LanguageModelObjective
from megatron.objective.metric import MetricSpec
from megatron.parallel.tensor.divergence import vocab_parallel_divergences

DISTILLATION_LOSS = "distillation_loss"
_PREFIX = "teacher_"
_LOGITS = _PREFIX + "logits"


@dataclass(frozen=True)
class Teacher:
    """A trained network that stays as it is.

    It is split over the tensor-parallel ranks as the network that is trained, and runs as a whole wherever losses are
    computed, or chunk by chunk on the ranks of a pipeline, as their `AuxiliaryNetwork`. No engine knows its weights, so
    nothing of it is optimized, partitioned or saved.

    Args:
        network: its layers on this rank, in evaluation mode, without gradients.
        steps: the settings of its contexts; what a token attends to is set as in the run.
        chunks: the places of each chunk's layers among them; None if all of them are here.
    """

    network: LayerStack
    steps: StepSettings
    chunks: Mapping[int, range] | None = None

    @property
    def output_name(self) -> str:
        return _LOGITS

    def empty_hidden(self, samples: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """See `AuxiliaryNetwork`."""
        return torch.empty(self.steps.hidden_shape(samples, tokens), dtype=self.steps.dtype, device=like.device)

    @torch.no_grad()
    def forward(self, chunk: int, hidden: Any, passed: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `AuxiliaryNetwork`; the student's inputs are its own as well."""
        layers = None if self.chunks is None else self.chunks[chunk]
        return self.network(hidden, self.steps.context_of(passed), layers)  # type: ignore[no-any-return]

    def inputs(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """What it reads of a micro-batch if it runs as a whole: the tokens, and what its context is built from."""
        names = () if self.chunks is not None else ("tokens", "sample_ids", *self.steps.passed)
        return {_PREFIX + name: getattr(batch, name) for name in names}

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its logits for what `inputs` named, or those of its last chunk. Shapes: `[b, s, v/t]`."""
        if self.chunks is not None:
            return inputs[_LOGITS]
        passed = [inputs[_PREFIX + name] for name in ("sample_ids", *self.steps.passed)]
        return self.forward(0, inputs[_PREFIX + "tokens"], passed)


@dataclass(frozen=True)
class DistillationObjective:
    """a L + b T^2 KL(teacher || student): L is what the student minimizes by itself.

    The divergence of the two distributions is taken at temperature T, per token, and tokens count in it as in L; the
    factor T^2 keeps the gradients of both parts in proportion when T changes. The loss that is reported is the plain
    cross-entropy, as without a teacher; b T^2 KL is a metric of its own. Without gradients, as in evaluation, the
    teacher is not asked.

    Args:
        student: the objective without a teacher.
        teacher: None on ranks that have none of it.
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
    def auxiliary_network(self) -> Teacher | None:
        """The teacher, where chunks of it run beside those of the student."""
        return self.teacher if self.teacher is not None and self.teacher.chunks is not None else None

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The student's metrics, and the second part per token or sample."""
        return {**self.student.metrics, DISTILLATION_LOSS: MetricSpec()}

    @property
    def statistics(self) -> Mapping[str, int]:
        return self.student.statistics

    def inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        return self.student.inputs(batch)

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The student's targets, and what the teacher reads."""
        return {**self.student.targets(batch), **(self.teacher.inputs(batch) if self.teacher is not None else {})}

    def token_count(self, batch: Batch) -> float:
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

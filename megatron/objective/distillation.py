"""Distillation: a network learns the distribution predicted by a trained one, its teacher, besides the labels."""

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
    """A trained network with frozen weights.

    It is split over the tensor-parallel ranks like the student, and runs as a whole on ranks that compute losses, or as
    an `AuxiliaryNetwork`, in chunks on the ranks of a pipeline. The engine has no access to its weights, so they are
    not optimized, partitioned or saved.

    Args:
        network: its layers on this rank, in evaluation mode, without gradients.
        steps: the settings of its contexts, with the run's attention mask.
        chunks: the indices of each chunk's layers; None if this rank has all layers.
    """

    network: LayerStack
    steps: StepSettings
    chunks: Mapping[int, range] | None = None

    @property
    def output_name(self) -> str:
        return _LOGITS

    def empty_hidden(self, samples: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.steps.hidden_shape(samples, tokens), dtype=self.steps.dtype, device=like.device)

    @torch.no_grad()
    def forward(self, chunk: int, hidden: Any, passed: Sequence[torch.Tensor]) -> torch.Tensor:
        layers = None if self.chunks is None else self.chunks[chunk]
        return self.network(hidden, self.steps.context_of(passed), layers)  # type: ignore[no-any-return]

    def inputs(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The arrays of a micro-batch that it needs to run as a whole: the tokens, and those of its context."""
        names = () if self.chunks is not None else ("tokens", "sample_ids", *self.steps.passed)
        return {_PREFIX + name: getattr(batch, name) for name in names}

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logits for the arrays of `inputs`, or the last chunk's. Shapes: `[b, s, v/t]`."""
        if self.chunks is not None:
            return inputs[_LOGITS]
        passed = [inputs[_PREFIX + name] for name in ("sample_ids", *self.steps.passed)]
        return self.forward(0, inputs[_PREFIX + "tokens"], passed)


@dataclass(frozen=True)
class DistillationObjective:
    """a L + b T^2 KL(teacher || student), where L is the student's objective.

    The divergence of the two distributions is taken at temperature T, per token, with the token weights of L; the
    factor T^2 keeps the gradients of both parts in proportion when T changes. The reported loss is the plain
    cross-entropy, as without a teacher; b T^2 KL is a separate metric. Without gradients, as in evaluation, the teacher
    does not run.

    Args:
        student: the objective without a teacher.
        teacher: the teacher; None on ranks without any of its layers.
        label_weight: a.
        teacher_weight: b.
        temperature: T.

    Source: Hinton et al., "Distilling the knowledge in a neural network", 2015; deepspeedai Megatron-DeepSpeed
    `pretrain_gpt.py`, `calculate_mos_loss`, which ignores the weight a and takes the softmax over a rank's part of a
    split vocabulary.
    """

    student: LanguageModelObjective
    teacher: Teacher | None
    label_weight: float = 1.0
    teacher_weight: float = 1.0
    temperature: float = 1.0

    @property
    def auxiliary_network(self) -> Teacher | None:
        """The teacher, if its chunks run along with the student's."""
        return self.teacher if self.teacher is not None and self.teacher.chunks is not None else None

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The student's metrics, and the divergence term per token or sample."""
        return {**self.student.metrics, DISTILLATION_LOSS: MetricSpec()}

    @property
    def statistics(self) -> Mapping[str, int]:
        return self.student.statistics

    def inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        return self.student.inputs(batch)

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The student's targets, and the teacher's inputs."""
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
        minimized = result.loss_sum if result.minimized_sum is None else result.minimized_sum
        return dataclasses.replace(
            result,
            loss_sum=result.loss_sum.detach(),
            minimized_sum=self.label_weight * minimized + added,
            metrics={**result.metrics, DISTILLATION_LOSS: torch.stack([added.detach(), mask.sum()])},
        )

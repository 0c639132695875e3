"""The objective with a teacher equals its formula in float64, and without gradients it is that without a teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import Batch
from megatron.model.interface.step_context import MaskKind, StepSettings
from megatron.objective.distillation import DISTILLATION_LOSS, DistillationObjective, Teacher
from megatron.objective.language_model import Z_LOSS, LanguageModelObjective
from megatron.parallel.mesh import Axis
from tests.helpers.networks import build_gpt, tiny_config

VOCABULARY, LENGTH = 101, 8
LABEL_WEIGHT, TEACHER_WEIGHT, TEMPERATURE, Z_COEFFICIENT = 0.25, 0.5, 2.0, 1e-3
DRAWN = np.random.default_rng(3)
BATCH = Batch(
    tokens=DRAWN.integers(0, VOCABULARY, (3, LENGTH)),
    labels=DRAWN.integers(0, VOCABULARY, (3, LENGTH)),
    loss_mask=(np.arange(LENGTH) < np.array([[2], [5], [8]])).astype(np.float32),
    sample_ids=np.arange(3),
    segment_ids=np.repeat([[0, 1]], 3, axis=0).repeat(LENGTH // 2, axis=1),
)


def objective(*, steps: StepSettings | None = None, averages_samples: bool = False) -> DistillationObjective:
    network = build_gpt(tiny_config(num_layers=1)).eval().requires_grad_(False)
    student = LanguageModelObjective(
        Axis.single("tp"), VOCABULARY, z_loss_coeff=Z_COEFFICIENT, averages_samples=averages_samples
    )
    return DistillationObjective(
        student, Teacher(network, steps or StepSettings()), LABEL_WEIGHT, TEACHER_WEIGHT, TEMPERATURE
    )


def tensors(aim: DistillationObjective) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in aim.targets(BATCH).items()}


@pytest.mark.parametrize("averages_samples", [False, True])
def test_the_formula(averages_samples: bool) -> None:
    aim = objective(averages_samples=averages_samples)
    assert aim.teacher is not None
    logits = torch.randn(3, LENGTH, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = aim(logits, tensors(aim))
    assert result.minimized_sum is not None
    result.minimized_sum.backward()

    taught = aim.teacher.logits(tensors(aim)).double()[..., :VOCABULARY]
    own = logits.detach().double().requires_grad_()
    true = own[..., :VOCABULARY]
    mask = torch.from_numpy(BATCH.loss_mask).double()
    weights = mask / mask.sum(1, keepdim=True) if averages_samples else mask
    plain = F.cross_entropy(true.transpose(1, 2), torch.from_numpy(BATCH.labels), reduction="none")
    z_losses = Z_COEFFICIENT * true.logsumexp(-1).square()
    soft, wanted = (part.div(TEMPERATURE).log_softmax(-1) for part in (true, taught))
    divergences = TEMPERATURE**2 * (wanted.exp() * (wanted - soft)).sum(-1)
    added = TEACHER_WEIGHT * (divergences * weights).sum()
    expected = LABEL_WEIGHT * ((plain + z_losses) * weights).sum() + added
    expected.backward()

    assert result.minimized_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    divisor = 3.0 if averages_samples else 15.0  # samples, or tokens
    assert result.metrics[DISTILLATION_LOSS].tolist() == pytest.approx([added.item(), divisor], rel=1e-5)
    assert result.loss_sum.item() == pytest.approx((plain * mask).sum().item(), rel=1e-5)
    assert own.grad is not None and logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), own.grad, rtol=1e-4, atol=1e-6)
    assert set(aim.metrics) == {Z_LOSS, DISTILLATION_LOSS, *(["sample_loss"] if averages_samples else [])}


def test_without_gradients_the_teacher_is_not_asked() -> None:
    aim, logits = objective(), torch.zeros(3, LENGTH, 128)
    with torch.no_grad():
        result = aim(logits, {"labels": torch.from_numpy(BATCH.labels), "loss_mask": torch.ones(3, LENGTH)})
    assert DISTILLATION_LOSS not in result.metrics
    assert result.loss_sum.item() == pytest.approx(3 * LENGTH * np.log(VOCABULARY), rel=1e-6)
    assert aim.token_count(BATCH) == 15.0 and aim.inputs(BATCH)[0] is BATCH.tokens


def test_the_teacher_sees_what_the_student_sees() -> None:
    separated = objective(steps=StepSettings(mask=MaskKind.DOCUMENTS))
    assert separated.teacher is not None
    named = [name for name in separated.targets(BATCH) if name.startswith("teacher_")]
    assert named == ["teacher_tokens", "teacher_sample_ids", "teacher_segment_ids"]
    found, mixed = separated.teacher.logits(tensors(separated)), objective()
    assert mixed.teacher is not None
    joined = mixed.teacher.logits(tensors(mixed))
    assert torch.allclose(found[:, 0], joined[:, 0]) and not torch.allclose(found[:, -1], joined[:, -1])
    assert not found.requires_grad and not list(DistillationObjective(mixed.student, None).targets(BATCH))[2:]

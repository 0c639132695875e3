"""The losses of masked language models against sums written out, and what batches give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import Batch
from megatron.objective.language_model import SAMPLE_LOSS
from megatron.objective.masked import ORDER_LOSS, MaskedLanguageModelObjective
from megatron.parallel.mesh import Axis

AXIS, VOCABULARY = Axis.single("tp"), 11
MASK = np.array([[0, 1, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], np.float32)
BATCH = Batch(
    tokens=np.zeros((3, 5), np.int64),
    labels=np.arange(15).reshape(3, 5) % VOCABULARY,
    loss_mask=MASK,
    sample_ids=np.arange(3),
    segment_ids=None,
    predicted=np.array([[1, 4, 0], [3, 0, 0], [0, 0, 0]]),
    swapped=np.array([1, 0, -1]),
)


def logits_of_all() -> torch.Tensor:
    return torch.randn(3, 5, VOCABULARY, generator=torch.Generator().manual_seed(1))


def of_predicted(logits: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[places] for row, places in zip(logits, torch.from_numpy(BATCH.predicted), strict=True)])


def targets_of(objective: MaskedLanguageModelObjective) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in objective.targets(BATCH).items()}


def masked_loss() -> torch.Tensor:
    losses = F.cross_entropy(logits_of_all().transpose(1, 2), torch.from_numpy(BATCH.labels), reduction="none")
    return (losses * torch.from_numpy(MASK)).sum()


def test_only_masked_tokens_count_and_each_once() -> None:
    objective = MaskedLanguageModelObjective(AXIS, VOCABULARY)
    targets = targets_of(objective)
    assert targets["labels"].tolist() == [[1, 4, 0], [8, 5, 5], [10, 10, 10]]
    assert targets["loss_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    result = objective(of_predicted(logits_of_all()), targets)
    assert (result.token_count.item(), objective.token_count(BATCH), result.sample_sum) == (3, 3, None)
    torch.testing.assert_close(result.loss_sum, masked_loss())


def test_the_sentence_order_is_a_loss_per_sample_and_a_metric() -> None:
    objective = MaskedLanguageModelObjective(AXIS, VOCABULARY, has_sentence_order=True)
    order_logits = torch.tensor([[0.5, -1.0], [2.0, 0.0], [9.0, -9.0]], requires_grad=True)
    result = objective((of_predicted(logits_of_all()), order_logits), targets_of(objective))
    expected = F.cross_entropy(order_logits[:2], torch.tensor([1, 0]), reduction="sum")  # the third is padding
    torch.testing.assert_close(result.loss_sum, masked_loss())
    assert result.sample_sum is not None
    torch.testing.assert_close(result.sample_sum, expected)
    assert set(objective.metrics) == {ORDER_LOSS}
    assert result.metrics[ORDER_LOSS].tolist() == pytest.approx([expected.item(), 2.0])
    (gradient,) = torch.autograd.grad(result.sample_sum, order_logits)
    assert gradient[2].tolist() == [0.0, 0.0] and gradient[:2].abs().min() > 0


def test_options_of_the_language_model_apply_to_predicted_tokens() -> None:
    objective = MaskedLanguageModelObjective(AXIS, VOCABULARY, averages_samples=True, z_loss_coeff=0.5)
    result = objective(of_predicted(logits_of_all()), targets_of(objective))
    assert objective.token_count(BATCH) == 2  # samples in which something is predicted
    assert result.metrics[SAMPLE_LOSS][1].item() == pytest.approx(2.0)

"""The language-model objective: sums, masks, and the loss of each source."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import Batch
from megatron.objective.language_model import (
    SAMPLE_LOSS,
    SOURCE_LOSSES,
    Z_LOSS,
    LanguageModelObjective,
    sample_means,
)
from megatron.objective.metric import MetricSpec
from megatron.parallel.mesh import Axis

LABELS = torch.tensor([[1, 2, 3], [4, 0, 1], [2, 2, 0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
LOGITS = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(0))


def test_the_sum_over_counted_tokens() -> None:
    result = LanguageModelObjective(Axis.single("tp"), 5)(LOGITS, {"labels": LABELS, "loss_mask": MASK})
    losses = F.cross_entropy(LOGITS[..., :5].flatten(0, 1), LABELS.flatten(), reduction="none").view(3, 3)
    assert result.loss_sum.item() == pytest.approx((losses * MASK).sum().item(), rel=1e-6)
    assert result.token_count == 6
    assert result.metrics == {}
    assert result.minimized_sum is None


@pytest.mark.parametrize(("smoothing", "coefficient"), [(0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
def test_what_is_minimized_and_what_is_reported(smoothing: float, coefficient: float) -> None:
    objective = LanguageModelObjective(Axis.single("tp"), 5, label_smoothing=smoothing, z_loss_coeff=coefficient)
    result = objective(LOGITS, {"labels": LABELS, "loss_mask": MASK})
    true = LOGITS[..., :5].flatten(0, 1)
    plain, smoothed = (
        (F.cross_entropy(true, LABELS.flatten(), reduction="none", label_smoothing=share) * MASK.flatten()).sum()
        for share in (0.0, smoothing)
    )
    z_loss = (coefficient * true.logsumexp(-1).square() * MASK.flatten()).sum()
    assert result.loss_sum.item() == pytest.approx(plain.item(), rel=1e-6)
    assert result.minimized_sum.item() == pytest.approx((smoothed + z_loss).item(), rel=1e-6)
    assert objective.metrics == ({Z_LOSS: MetricSpec()} if coefficient else {})
    assert {name: value.tolist() for name, value in result.metrics.items()} == (
        {Z_LOSS: pytest.approx([z_loss.item(), 6.0], rel=1e-6)} if coefficient else {}
    )


def test_losses_of_sources_add_up_to_the_whole() -> None:
    objective = LanguageModelObjective(Axis.single("tp"), 5, sources=("a", "b", "c", "d"))
    targets = {"labels": LABELS, "loss_mask": MASK, "source_ids": torch.tensor([2, 0, 2])}
    result = objective(LOGITS, targets)
    losses, tokens = result.metrics[SOURCE_LOSSES]
    assert tokens.tolist() == [1.0, 0.0, 5.0, 0.0]
    assert losses.sum().item() == pytest.approx(result.loss_sum.item(), rel=1e-6)
    assert objective.metrics[SOURCE_LOSSES].labels == ("a", "b", "c", "d")
    assert torch.equal(result.loss_sum, LanguageModelObjective(Axis.single("tp"), 5)(LOGITS, targets).loss_sum)


def test_a_mean_over_samples_weighs_short_and_long_samples_alike() -> None:
    mask = torch.cat([MASK[:2], torch.zeros(1, 3)])  # two, one and no label that count
    batch = Batch(LABELS.numpy(), LABELS.numpy(), mask.numpy(), np.arange(3), segment_ids=None)
    objective = LanguageModelObjective(Axis.single("tp"), 5, averages_samples=True)
    assert objective.token_count(batch) == 2.0
    result = objective(LOGITS, {name: torch.from_numpy(value) for name, value in objective.targets(batch).items()})
    losses = F.cross_entropy(LOGITS[..., :5].transpose(1, 2), LABELS, reduction="none")
    expected = (losses[0, :2].mean() + losses[1, 0]).item()
    assert result.minimized_sum is not None
    assert result.minimized_sum.item() == pytest.approx(expected, rel=1e-6)
    assert result.loss_sum.item() == pytest.approx((losses * mask).sum().item(), rel=1e-6)
    assert result.token_count == 3
    assert objective.metrics == {SAMPLE_LOSS: MetricSpec()}
    assert result.metrics[SAMPLE_LOSS].tolist() == pytest.approx([expected, 2.0], rel=1e-6)


def test_the_weights_of_a_sample_sum_to_one_over_its_counted_labels() -> None:
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0.5, 0, 0, 0.25]], np.float32)
    found = sample_means(mask)
    assert found.samples == 3
    assert found.weights.dtype == np.float32
    assert (found.weights * mask).sum(axis=1).tolist() == [1, 1, 0, 1]
    assert found.weights[:, 0].tolist() == [0.5, 0.25, 0.0, np.float32(1 / 0.75)]


def test_packed_samples_count_each() -> None:
    mask = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.float32)
    segments = np.array([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]])
    found = sample_means(mask, segments)
    assert found.samples == 4  # the padding of the first row is a segment without labels
    assert (found.weights * mask).tolist() == [[0, 1, 0.5, 0.5, 0], [0.25, 0.25, 0.25, 0.25, 1]]

"""Multi-token prediction: which labels count at which depth, and what is minimized and reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import Batch
from megatron.objective.language_model import SAMPLE_LOSS, SOURCE_LOSSES, Z_LOSS
from megatron.objective.multi_token import MTP_LOSSES, MultiTokenObjective
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.head_loss import FactoredLogits

LABELS = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 1, 2]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]], np.float32)
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(6, 5, 4, generator=GENERATOR)
WEIGHT = torch.randn(8, 4, generator=GENERATOR)


def batch_of(**changes: Any) -> Batch:
    return dataclasses.replace(Batch(LABELS - 1, LABELS, MASK, np.arange(2), segment_ids=None), **changes)


def objective_of(**changes: Any) -> MultiTokenObjective:
    return MultiTokenObjective(Axis.single("tp"), 8, depths=2, scale=0.6, **changes)


def targets_of(objective: MultiTokenObjective, batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in objective.targets(batch).items()}


def test_labels_of_a_depth_lie_further_on_and_the_last_places_do_not_count() -> None:
    targets = objective_of().targets(batch_of())
    assert targets["labels"][2:4].tolist() == [[2, 3, 4, 5, 0], [7, 0, 1, 2, 0]]
    assert targets["labels"][4:].tolist() == [[3, 4, 5, 0, 0], [0, 1, 2, 0, 0]]
    assert targets["loss_mask"][2:4].tolist() == [[1, 1, 1, 1, 0], [1, 0, 1, 1, 0]]
    assert targets["loss_mask"][4:].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]
    assert objective_of().token_count(batch_of()) == 9.0


def test_no_place_looks_over_the_end_of_a_document() -> None:
    masked = objective_of(stops_at_masked=True).targets(batch_of())["loss_mask"]
    assert masked[3].tolist() == [1, 0, 0, 1, 0] and masked[5].tolist() == [0, 0, 0, 0, 0]
    segments = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    separated = objective_of().targets(batch_of(segment_ids=segments))["loss_mask"]
    assert separated[2].tolist() == [1, 1, 0, 1, 0] and separated[4].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "coefficient", "averages"), [(0.0, 0.0, False), (0.1, 0.02, False), (0.0, 0.0, True)]
)
def test_what_is_minimized_and_what_is_reported(
    factored: bool, smoothing: float, coefficient: float, averages: bool
) -> None:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    changes = {"label_smoothing": smoothing, "z_loss_coeff": coefficient, "averages_samples": averages}
    objective = objective_of(sources=("a", "b"), **changes)
    batch = batch_of(source_ids=np.array([1, 0]))
    outputs = FactoredLogits(hidden, weight) if factored else hidden @ weight.t()
    result = objective(outputs, targets_of(objective, batch), torch.tensor(2.0))
    assert result.minimized_sum is not None
    result.minimized_sum.backward()

    other, table = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    minimized, plain_sums, counts = torch.zeros(()), [0.0] * 3, [0.0] * 3
    for sample in range(2):
        for depth in range(3):
            for place in range(5 - depth):
                logits = other[2 * depth + sample, place] @ table.t()
                label, counted = torch.tensor(int(LABELS[sample, place + depth])), float(MASK[sample, place + depth])
                plain = F.cross_entropy(logits, label)
                term = F.cross_entropy(logits, label, label_smoothing=smoothing)
                term = term + coefficient * logits.logsumexp(0).square()
                share = counted / float(MASK[sample].sum()) if averages else counted
                minimized = minimized + term * share * (1.0 if depth == 0 else 0.6 / 2)
                plain_sums[depth] += plain.item() * counted
                counts[depth] += counted
    minimized.backward()
    assert result.minimized_sum.item() == pytest.approx(minimized.item(), rel=1e-5)
    assert result.loss_sum.item() == pytest.approx(plain_sums[0], rel=1e-5) and result.token_count == counts[0]
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, table.grad, rtol=1e-4, atol=1e-6)
    assert result.metrics[MTP_LOSSES].flatten().tolist() == pytest.approx([*plain_sums[1:], *counts[1:]], rel=1e-5)
    names = {SOURCE_LOSSES, MTP_LOSSES} | ({Z_LOSS} if coefficient else set())
    assert set(result.metrics) == set(objective.metrics) == names | ({SAMPLE_LOSS} if averages else set())
    assert result.metrics[SOURCE_LOSSES][1].tolist() == [4.0, 5.0]


def test_an_evaluation_has_the_next_token_alone() -> None:
    objective = objective_of()
    result = objective(HIDDEN[:2] @ WEIGHT.t(), targets_of(objective, batch_of()))
    assert result.token_count == 9 and MTP_LOSSES not in result.metrics

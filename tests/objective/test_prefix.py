"""The prefix objective against plain torch, and the number that upstream divides by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.datasets.changed_samples import PrefixDataset, prefix_length
from megatron.data.datasets.sample import Sample
from megatron.data.loader import Batch, segment_ids
from megatron.objective.language_model import Z_LOSS, LanguageModelObjective, PrefixObjective
from megatron.parallel.mesh import Axis

LENGTH = 6
LABELS = torch.tensor([[1, 2, 3, 0, 4, 4], [4, 0, 1, 2, 2, 3]])
MASK = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 5 + [0.0]])
LOGITS = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
TARGETS = {"labels": LABELS, "loss_mask": MASK}


def _batch(samples: int = 2) -> Batch:
    rows = np.zeros((samples, LENGTH), np.int64)
    return Batch(rows, rows, np.ones((samples, LENGTH), np.float32), np.arange(samples), None)


def _weights(length: int) -> list[float]:
    return [2 * (length - position) / (length + 1) for position in range(length)]


@pytest.mark.parametrize("on_targets_only", [False, True])
@pytest.mark.parametrize("reweights", [False, True])
def test_what_is_minimized_is_upstreams_and_what_is_logged_is_plain(on_targets_only: bool, reweights: bool) -> None:
    objective = PrefixObjective(
        Axis.single("tp"), 5, on_targets_only=on_targets_only, reweights_positions=reweights, z_loss_coeff=1e-2
    )
    added = {name: torch.from_numpy(array) for name, array in objective.targets(_batch()).items()}
    result = objective(LOGITS, {**added, **TARGETS})
    true = LOGITS[..., :5].flatten(0, 1)
    losses = F.cross_entropy(true, LABELS.flatten(), reduction="none").view(2, LENGTH) * MASK
    z_losses = 1e-2 * true.logsumexp(-1).square().view(2, LENGTH) * MASK
    weights = torch.tensor(_weights(LENGTH)) if reweights else torch.ones(LENGTH)
    assert result.minimized_sum is not None
    assert result.minimized_sum.item() == pytest.approx(((losses + z_losses) * weights).sum().item(), rel=1e-6)
    assert result.loss_sum.item() == pytest.approx(losses.sum().item(), rel=1e-6)
    assert result.token_count == 9
    assert result.metrics[Z_LOSS][0].item() == pytest.approx(z_losses.sum().item(), rel=1e-6)


@pytest.mark.parametrize("reweights", [False, True])
def test_losses_are_divided_by_what_prefixes_leave_on_average(reweights: bool) -> None:
    weights = _weights(LENGTH) if reweights else [1.0] * LENGTH
    left = [sum(weights[length - 1 :]) for length in range(1, LENGTH + 1)]
    objective = PrefixObjective(Axis.single("tp"), 5, on_targets_only=True, reweights_positions=reweights)
    assert objective.token_count(_batch(3)) == pytest.approx(3 * sum(left) / LENGTH)
    drawn = [left[prefix_length(LENGTH, 1, sample, 0) - 1] for sample in range(5000)]
    assert np.mean(drawn) == pytest.approx(objective.token_count(_batch(1)), rel=0.05)
    everywhere = PrefixObjective(Axis.single("tp"), 5, reweights_positions=reweights)
    assert everywhere.token_count(_batch(3)) == pytest.approx(3 * sum(weights))


@pytest.mark.parametrize("reweights", [False, True])
@pytest.mark.parametrize("mean_length", [5, 40])
def test_prefixes_of_documents_leave_what_losses_are_divided_by(mean_length: int, reweights: bool) -> None:
    """Half of a sample only where documents are long; positions are counted from the beginning of a document."""
    length, draws = 256, np.random.default_rng(7)
    tokens = np.where(draws.random((1, length + 1)) < 1 / mean_length, 0, 5)
    objective = PrefixObjective(
        Axis.single("tp"), 5, on_targets_only=True, by_document=True, reweights_positions=reweights
    )
    whole: Any = SimpleNamespace(read=lambda sample: Sample(tokens[0]))
    dataset = PrefixDataset(whole, 1, eod_id=0, on_targets_only=True)
    mask, segments = np.ones((1, length), np.float32), segment_ids(tokens[:, :-1], 0)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, np.arange(1), segments)
    weights = objective.targets(batch).get("position_weights", mask)[0]
    last = int(np.flatnonzero(tokens[0] == 0)[0])
    if reweights:
        assert weights[: last + 1] == pytest.approx([2 * (last + 1 - place) / (last + 2) for place in range(last + 1)])
    left = [(dataset.read(sample).loss_mask * weights).sum() for sample in range(400)]
    assert objective.token_count(batch) == pytest.approx(np.mean(left), rel=0.02)


def test_without_weights_it_is_the_language_model() -> None:
    prefix, plain = (kind(Axis.single("tp"), 5)(LOGITS, TARGETS) for kind in (PrefixObjective, LanguageModelObjective))
    assert torch.equal(prefix.loss_sum, plain.loss_sum) and prefix.minimized_sum is None

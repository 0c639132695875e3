"""The scoring objective: every target has a place, and micro-batches add up to all of them."""

from __future__ import annotations

import torch

from megatron.objective.base import sum_sizes
from megatron.objective.scoring import LOGPROBS, PREDICTED, ScoringObjective, score_targets
from megatron.parallel.mesh import Axis

LOGITS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
TRUE = LOGITS[..., :5].flatten(0, 1).log_softmax(-1)
OBJECTIVE = ScoringObjective(Axis.single("tp"), 5, target_count=6)


def test_scores_of_targets_leave_out_the_padding() -> None:
    labels = torch.tensor([3, 0, 4, 4, 1, 2])
    found = score_targets(LOGITS.flatten(0, 1), labels, Axis.single("tp"), 5)
    torch.testing.assert_close(found.logprobs, TRUE.gather(1, labels[:, None]).squeeze(1))
    assert torch.equal(found.predicted, TRUE.argmax(-1))


def test_each_target_is_at_its_place_and_the_others_are_0() -> None:
    targets = {"rows": torch.tensor([1, 5]), "labels": torch.tensor([4, 0]), "indices": torch.tensor([3, 0])}
    result = OBJECTIVE(LOGITS, targets)
    expected = [TRUE[5, 0], 0, 0, TRUE[1, 4], 0, 0]
    torch.testing.assert_close(result.metrics[LOGPROBS], torch.tensor(expected, dtype=torch.float64))
    assert result.metrics[PREDICTED].tolist() == [float(TRUE[5].argmax()), 0, 0, float(TRUE[1].argmax()), 0, 0]
    torch.testing.assert_close(result.loss_sum, -(TRUE[5, 0] + TRUE[1, 4]))
    assert result.token_count == 2
    assert {name: len(values) for name, values in result.metrics.items()} == sum_sizes(OBJECTIVE)


def test_a_micro_batch_of_padding_has_no_targets() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    result = OBJECTIVE(LOGITS, {"rows": nothing, "labels": nothing, "indices": nothing})
    assert result.token_count == 0 and result.loss_sum == 0
    assert all(not values.any() for values in result.metrics.values())

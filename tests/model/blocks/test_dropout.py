"""Hidden dropout: one mask per site, independent of the rank that computes a part of a sequence."""

from __future__ import annotations

import torch

from megatron.model.blocks.dropout import EMBEDDING_SITE, DropoutSite, dropout_at
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.split import SequenceSplit


def test_each_site_has_a_mask_of_its_own_that_goes_by_samples_and_positions() -> None:
    hidden = torch.zeros(2, 8, 16)
    context = StepContext(torch.tensor([3, 4]), seed=7)
    found = {site: dropout_at(DropoutSite(site), 0.25, hidden, context) for site in (EMBEDDING_SITE, 1)}
    masks = {site: dropout.kept(16) for site, dropout in found.items() if dropout is not None}
    assert not torch.equal(masks[EMBEDDING_SITE], masks[1]) and not torch.equal(masks[1][0], masks[1][1])
    other_sample = dropout_at(DropoutSite(1), 0.25, hidden[1:], StepContext(torch.tensor([4]), seed=7))
    later_part = dropout_at(
        DropoutSite(1), 0.25, hidden[:, 5:], StepContext(torch.tensor([3, 4]), seed=7, position_offset=5)
    )
    assert other_sample is not None and torch.equal(other_sample.kept(16), masks[1][1:])
    assert later_part is not None and torch.equal(later_part.kept(16), masks[1][:, 5:])
    assert dropout_at(DropoutSite(1), 0.0, hidden, context) is None


def test_ranks_that_share_a_sample_drop_the_same_entries_as_one_rank() -> None:
    split = SequenceSplit(Axis("cp", 1, 2, (0, 1)), Axis.single("sp"))
    hidden, ids = torch.zeros(2, 8, 16), torch.tensor([3, 4])
    whole = dropout_at(DropoutSite(1), 0.25, hidden, StepContext(ids, seed=7))
    part = dropout_at(DropoutSite(1), 0.25, hidden[:, :4], StepContext(ids, seed=7, split=split))
    assert whole is not None and part is not None
    assert torch.equal(part.kept(16), whole.kept(16)[:, [2, 3, 4, 5]])

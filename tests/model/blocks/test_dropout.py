"""What the sites of hidden dropout drop: one mask a site, the same wherever a part of a sequence is computed."""

from __future__ import annotations

import torch

from megatron.model.blocks.dropout import EMBEDDING_SITE, dropout_at
from megatron.model.interface.step_context import StepContext


def test_each_site_has_a_mask_of_its_own_that_goes_by_samples_and_positions() -> None:
    hidden = torch.zeros(2, 8, 16)
    context = StepContext(torch.tensor([3, 4]), seed=7)
    found = {site: dropout_at(site, 0.25, hidden, context) for site in (EMBEDDING_SITE, 1)}
    masks = {site: dropout.kept(16) for site, dropout in found.items() if dropout is not None}
    assert not torch.equal(masks[EMBEDDING_SITE], masks[1]) and not torch.equal(masks[1][0], masks[1][1])
    other_sample = dropout_at(1, 0.25, hidden[1:], StepContext(torch.tensor([4]), seed=7))
    later_part = dropout_at(1, 0.25, hidden[:, 5:], StepContext(torch.tensor([3, 4]), seed=7, position_offset=5))
    assert other_sample is not None and torch.equal(other_sample.kept(16), masks[1][1:])
    assert later_part is not None and torch.equal(later_part.kept(16), masks[1][:, 5:])
    assert dropout_at(1, 0.0, hidden, context) is None

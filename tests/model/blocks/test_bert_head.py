"""The heads of an encoder: which positions they predict, and their parts."""

from __future__ import annotations

import torch

from megatron.model.blocks.bert_head import BertHead, rows_at
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from tests.helpers.networks import tiny_config

MESH = ParallelMesh.single()
HIDDEN = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3))
PREDICTED = torch.tensor([[2, 5, 0], [1, 0, 0]])


def head(**changes: bool) -> BertHead:
    built = BertHead(tiny_config(bidirectional=True, **changes), MESH)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return built


def test_logits_are_computed_at_the_predicted_positions_only() -> None:
    built = head(masked_lm_head=True)
    everything = built(HIDDEN, StepContext(torch.arange(2)))
    some = built(HIDDEN, StepContext(torch.arange(2), predicted=PREDICTED))
    assert some.shape == (2, 3, 128)
    torch.testing.assert_close(some, rows_at(everything, PREDICTED))
    assert torch.equal(rows_at(HIDDEN, PREDICTED)[0, 1], HIDDEN[0, 5])


def test_the_order_comes_from_the_first_token() -> None:
    built = head(sentence_order_head=True)
    _, order = built(HIDDEN, StepContext(torch.arange(2)))
    changed = HIDDEN.clone()
    changed[:, 1:] = 0
    assert torch.equal(built(changed, StepContext(torch.arange(2)))[1], order) and order.shape == (2, 2)
    changed[:, 0] = 0
    assert not torch.equal(built(changed, StepContext(torch.arange(2)))[1], order)


def test_a_head_without_parts_is_the_plain_one() -> None:
    names = {name for name, _ in head().named_parameters()}
    assert names == {"weight"}
    bias = head(masked_lm_head=True).bias
    assert bias is not None and shard_spec_of(bias).shape == (101,) and bias.shape == (128,)

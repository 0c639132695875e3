"""What a block keeps for its backward pass."""

from __future__ import annotations

import gc
import weakref

import torch

from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.joining import open_mesh
from tests.helpers.layouts import Layout
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks


def run_block(rank: int) -> dict[str, tuple[bool, torch.Tensor, torch.Tensor]]:
    """Whether the input of a block outlives its forward pass, its output and the gradient of its input."""
    mesh = open_mesh(Layout(2))
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0)
    block = TransformerBlock(config, mesh, 0)
    for place, parameter in enumerate(block.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(place))
    found = {}
    for recompute in (Recompute.NONE, Recompute.BLOCKS, Recompute.SPLIT_BLOCKS):
        context = StepContext(torch.arange(2), recompute=recompute)
        start = torch.randn(2, 5, config.hidden_size, generator=torch.Generator().manual_seed(3)).requires_grad_()
        hidden = start * 1
        output, alive = block(hidden, context), weakref.ref(hidden)
        del hidden
        gc.collect()
        is_kept = alive() is not None
        output.square().sum().backward()
        found[recompute.value] = (is_kept, output.detach(), start.grad)
    return found  # type: ignore[return-value]


def test_a_split_input_is_not_kept_whole_and_changes_no_number() -> None:
    for found in run_ranks(run_block, 2):
        assert [found[mode][0] for mode in ("blocks", "split blocks")] == [True, False]
        for mode in ("blocks", "split blocks"):
            for value, expected in zip(found[mode][1:], found["none"][1:], strict=True):
                torch.testing.assert_close(value, expected, rtol=0, atol=0)

"""A block's saved tensors and its tensor-parallel communication."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron.model.blocks.embedding import OutputHead, PositionEmbedding, WordEmbedding
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.joining import open_mesh
from tests.helpers.layouts import Layout
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks


def run_block(rank: int) -> dict[str, tuple[bool, torch.Tensor, torch.Tensor]]:
    """Runs a block; returns True if its input outlives forward, its output, and the gradient of its input."""
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


class SentValues:
    """Counts what this rank sends by messages of each kind, in units of (t - 1) / t values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: Counter[str] = Counter()
        # of which argument's size a ring algorithm sends this many times (t - 1) / t
        for name, argument, times in (
            ("all_reduce", 0, 2), ("all_gather_into_tensor", 0, 1), ("reduce_scatter_tensor", 1, 1),
        ):  # fmt: skip
            monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name), argument, times))
        for name in ("all_gather", "all_to_all", "all_to_all_single", "broadcast", "reduce", "reduce_scatter"):
            monkeypatch.setattr(dist, name, None)  # which would not be counted

    def _counted(self, name, send, argument, times):
        def counted(*arguments, **options):
            self.values[name] += times * arguments[argument].numel()
            return send(*arguments, **options)

        return counted


def count_values(rank: int) -> dict[str, dict[str, list[dict[str, int]]]]:
    """The values that the forward and the backward pass of each layer send, without and with sequence parallelism."""
    plain, found = open_mesh(Layout(2)), {}
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0)
    for name, mesh in (("plain", plain), ("split", dataclasses.replace(plain, splits_sequence=True))):
        axis, found[name] = mesh.sequence_parallel, {}
        tokens = torch.randint(0, 101, (3, 8), generator=torch.Generator().manual_seed(1))
        hidden = torch.randn(3, 8 // axis.size, config.hidden_size, requires_grad=True)
        for layer, given in (
            (WordEmbedding(config, mesh), tokens),
            (PositionEmbedding(config, mesh), hidden),
            (TransformerBlock(config, mesh, 0), hidden),
            (OutputHead(config, mesh), hidden),
        ):
            with pytest.MonkeyPatch.context() as monkeypatch:
                sent = SentValues(monkeypatch)
                output = layer(given, StepContext(torch.arange(3), sequence_parallel=axis))
                forward = dict(sent.values)
                sent.values.clear()
                output.sum().backward()
                found[name][type(layer).__name__] = [forward, dict(sent.values)]
    return found


def test_ranks_send_what_the_formula_says() -> None:
    whole = 3 * 8 * 32  # b, s, h
    gathered, summed = "all_gather_into_tensor", "reduce_scatter_tensor"
    for found in run_ranks(count_values, 2):
        assert found["plain"] == {
            "WordEmbedding": [{"all_reduce": 2 * whole}, {}],
            "PositionEmbedding": [{}, {}],
            "TransformerBlock": [{"all_reduce": 4 * whole}] * 2,
            "OutputHead": [{}, {"all_reduce": 2 * whole}],
        }
        assert found["split"] == {
            "WordEmbedding": [{summed: whole}, {gathered: whole}],
            "PositionEmbedding": [{}, {}],  # the sum of its gradients goes once a step, for all micro-batches
            "TransformerBlock": [{gathered: 2 * whole, summed: 2 * whole}, {gathered: 4 * whole, summed: 2 * whole}],
            "OutputHead": [{gathered: whole}, {summed: whole}],
        }

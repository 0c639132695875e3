"""Split layers equal the plain ones, forward and gradients; ids outside the vocabulary are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import DataError
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension, ShardSpec, shard_spec_of
from megatron.parallel.tensor.layers import ColumnParallelLinear, Finish, RowParallelLinear, VocabParallelEmbedding
from megatron.parallel.tensor.norms import LayerNorm
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

INNER, WIDTH, VOCABULARY, PADDED = 12, 6, 11, 16


def _column(input_size: int, output_size: int, axis: Axis, **changes: Any) -> ColumnParallelLinear:
    outputs = (Dimension("outputs", output_size, axis),)
    return ColumnParallelLinear(input_size, outputs, axis, **changes)


def _box(spec: ShardSpec) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(spec.start, spec.stop, strict=True))


def _fill(module: nn.Module, prefix: str) -> None:
    """Gives a split module its part of seeded global weights."""
    for name, parameter in module.named_parameters():
        spec = shard_spec_of(parameter)
        generator = torch.Generator().manual_seed(len(prefix + name))
        part = torch.randn(spec.shape, generator=generator)[_box(spec)]
        with torch.no_grad():
            parameter.view(-1)[: part.numel()] = part.flatten()


def _added(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert bias is not None
    return product + bias


def _network(axis: Axis, finish: Finish | None = None) -> dict:
    column = _column(WIDTH, INNER, axis)
    row = RowParallelLinear(INNER, WIDTH, axis)
    table = VocabParallelEmbedding(VOCABULARY, PADDED, WIDTH, axis)
    norm = LayerNorm(WIDTH, 1e-5)
    modules = {"column": column, "row": row, "table": table, "norm": norm}
    for name, module in modules.items():
        _fill(module.double(), name)  # so that rounding hides nothing
    ids = torch.tensor([[0, 3, 10, 7], [9, 1, 8, 2]])
    x = table(ids)
    x.retain_grad()
    y = row(F.gelu(column(norm(x), finish)), finish)
    y.square().sum().backward()
    return {
        "y": y.detach(),
        "x.grad": x.grad,
        "gradients": {
            f"{name}.{inner}": (_box(shard_spec_of(parameter)), parameter.grad)
            for name, module in modules.items()
            for inner, parameter in module.named_parameters()
        },
        "split": sorted(
            f"{name}.{inner}"
            for name, module in modules.items()
            for inner, parameter in module.named_parameters()
            if shard_spec_of(parameter).split_axes == ("tp",)
        ),
    }


def _on_rank(rank: int) -> dict:
    return _network(open_mesh(Layout(2)).tp, _added)  # the caller adds the biases


def test_split_equals_dense() -> None:
    dense = _network(Axis.single("tp"))
    parts = run_ranks(_on_rank, 2)
    split = ["column.bias", "column.weight", "row.weight", "table.weight"]
    for part in parts:
        assert part["split"] == split
        torch.testing.assert_close(part["y"], dense["y"])
        torch.testing.assert_close(part["x.grad"], dense["x.grad"])
        for name, (box, gradient) in part["gradients"].items():
            whole = dense["gradients"][name][1]
            expected = whole[box]
            assert (name in split) == (tuple(gradient.shape) != tuple(whole.shape))
            torch.testing.assert_close(gradient[: expected.shape[0]], expected)
            assert not gradient[expected.shape[0] :].any()  # padded rows get no gradient
    for name, (_, gradient) in parts[0]["gradients"].items():
        if name not in split:
            assert torch.equal(gradient, parts[1]["gradients"][name][1]), name


def _bad_ids(rank: int) -> list[str]:
    table = VocabParallelEmbedding(VOCABULARY, PADDED, WIDTH, open_mesh(Layout(2)).tp)
    return _refusals(table)


def _refusals(table: VocabParallelEmbedding) -> list[str]:
    texts = []
    for wrong in (VOCABULARY, PADDED + 3, -1):
        try:
            table(torch.tensor([[1, wrong]]))
        except DataError as failure:
            texts.append(str(failure))
    return texts


def test_an_id_outside_the_vocabulary_is_rejected_with_and_without_splitting() -> None:
    sentence = "There is an input id in the input that is greater than the highest possible input id"
    whole = VocabParallelEmbedding(VOCABULARY, PADDED, WIDTH, Axis.single("tp"))
    for texts in (_refusals(whole), *run_ranks(_bad_ids, 2)):
        assert len(texts) == 3
        assert sentence in texts[0] and "11, and the vocabulary has 11" in texts[0]
        assert sentence in texts[1] and ": 19," in texts[1]
        assert "negative input id (-1)" in texts[2]
    with pytest.raises(DataError, match="ids 0 to 10"):
        whole(torch.tensor([VOCABULARY]))
    with pytest.raises(DataError, match=r"negative input id \(-1\)"):
        whole(torch.tensor([-1]))
    assert whole(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, WIDTH)

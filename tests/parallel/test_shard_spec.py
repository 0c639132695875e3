"""A parameter's place: what each rank holds, who accounts for it, and what cannot be split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.parallel.mesh import Axis, AxisSize, ParallelMesh, standard_axes
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate, check_divisible, shard_spec_of


def axis(rank: int, size: int, name: str = "tp") -> Axis:
    return Axis(name, rank, size, tuple(range(size)))


@pytest.mark.parametrize("padded", [None, 16])
def test_ranks_hold_every_element_once(padded: int | None) -> None:
    seen = np.zeros((12, 3, 4), dtype=int)
    for first in range(2):
        for last in range(4):
            rows, columns = axis(first, 2, "a"), axis(last, 4, "b")
            spec = ShardSpec(
                (Dimension("rows", 12, rows, padded), Dimension("three", 3), Dimension("columns", 4, columns))
            )
            assert math.prod(spec.local_shape) == (8 if padded else 6) * 3
            assert spec.box_numel == math.prod(spec.box_shape)
            seen[tuple(slice(start, stop) for start, stop in zip(spec.start, spec.stop, strict=True))] += 1
    assert (seen == 1).all()


def test_a_rank_may_hold_padding_only() -> None:
    spec = ShardSpec((Dimension("rows", 5, axis(1, 2), 16), Dimension("hidden", 3)))
    assert (spec.start, spec.stop) == ((5, 0), (5, 3))
    assert (spec.box_numel, spec.local_shape) == (0, (8, 3))


def test_replicated_parameters_are_counted_on_the_first_rank_of_each_axis() -> None:
    sizes = (*standard_axes(8, tp=2, pp=2)[:-1], AxisSize("row", 2, "tensor"), AxisSize("tp", 2, "tensor"))
    counted = {"whole": set(), "tp": set(), "row": set(), "both": set()}
    for rank in range(16):
        mesh = ParallelMesh.at(sizes, rank)
        row, tp = mesh.axis("row"), mesh.tp
        specs = {
            "whole": ShardSpec.vector(4),
            "tp": ShardSpec.vector(4, tp),
            "row": ShardSpec.vector(4, row),
            "both": ShardSpec((Dimension("a", 4, row), Dimension("b", 4, tp))),
        }
        for name, spec in specs.items():
            if spec.is_counted(mesh):
                counted[name].add((row.rank, tp.rank))
            assert not spec.as_tied_copy().is_counted(mesh)
    everybody = {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert counted == {"whole": {(0, 0)}, "tp": {(0, 0), (0, 1)}, "row": {(0, 0), (1, 0)}, "both": everybody}


def test_a_parameter_has_its_spec() -> None:
    spec = ShardSpec((Dimension("heads", 2), Dimension("qkv", 3), Dimension("size", 4)), is_matrix=True)
    parameter = annotate(nn.Parameter(torch.zeros(6, 4)), spec)  # merged dimensions
    assert shard_spec_of(parameter) is spec
    plain = shard_spec_of(torch.zeros(3, 5))
    assert (plain.shape, plain.is_matrix, plain.split_axes) == ((3, 5), True, ())
    assert not shard_spec_of(torch.zeros(3)).is_matrix
    with pytest.raises(ConfigError, match=r"shape \[5, 4\] cannot be the local part \[2, 3, 4\]"):
        annotate(nn.Parameter(torch.zeros(5, 4)), spec)


def test_uneven_splits_are_rejected() -> None:
    with pytest.raises(ConfigError, match="10 heads cannot be split over 4 ranks .--tensor-model-parallel-size 4."):
        ShardSpec((Dimension("heads", 10, axis(0, 4)),))
    with pytest.raises(ConfigError, match="7 experts cannot be split over 2 ranks .--expert-model-parallel-size 2."):
        check_divisible(7, axis(0, 2, "ep"), "experts")
    with pytest.raises(ConfigError, match=r"shape \[4, 4\] is split twice over the same axis .*tp, tp"):
        ShardSpec((Dimension("a", 4, axis(0, 2)), Dimension("b", 4, axis(0, 2))))
    with pytest.raises(ConfigError, match="dimension 1 .columns. of a parameter is padded"):
        ShardSpec((Dimension("rows", 4), Dimension("columns", 4, None, 8)))

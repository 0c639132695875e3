"""Pieces of parameters, and where loaded ones go."""

from __future__ import annotations

import torch

from megatron.parallel.mesh import Axis
from megatron.parallel.pieces import PieceKey, filling
from megatron.parallel.shard_spec import Dimension, ShardSpec

SPEC = ShardSpec((Dimension("halves", 2), Dimension("inner", 6, Axis("tp", 1, 2, (0, 1))), Dimension("hidden", 4)))


def test_a_piece_of_a_parameter() -> None:
    whole = PieceKey.of(SPEC, "fc1", "weight")
    assert whole == PieceKey("fc1", "weight", (2, 6, 4), (0, 3, 0), (2, 6, 4), 0, 24)
    assert (whole.numel, whole.box_shape, whole.box_numel) == (24, (2, 3, 4), 24)
    part = PieceKey.of(SPEC, "fc1", "exp_avg", 5, 20)
    assert (part.kind, part.first, part.last) == ("exp_avg", 5, 20)
    narrowed = part.narrowed(3, 10)
    assert (narrowed.first, narrowed.last, narrowed.shape) == (8, 15, part.shape)


def test_loaded_values_fill_their_targets() -> None:
    targets = {name: torch.zeros(24, requires_grad=True, dtype=torch.bfloat16) for name in ("a", "b")}
    wanted = list(filling((PieceKey.of(SPEC, name, "weight"), target) for name, target in targets.items()))
    assert [key.name for key, _ in wanted] == ["a", "b"]
    for number, (_, fill) in enumerate(wanted, start=1):
        fill(torch.full((24,), float(number)))
    assert targets["a"].tolist() == [1.0] * 24
    assert targets["b"].tolist() == [2.0] * 24

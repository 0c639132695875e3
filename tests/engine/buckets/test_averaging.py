"""How ranks average gradients, in the dtypes and with the factors that DeepSpeed has settings for."""

from __future__ import annotations

import pytest
import torch

from megatron.engine.buckets.averaging import Averaging
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

# Dtype of the gradients, of the messages, divisor before the sum, dtype of parts that are exchanged and summed.
CASES = [
    (torch.float32, torch.float32, None, None),
    (torch.float32, torch.float32, 4.0, None),
    (torch.float32, torch.bfloat16, None, None),
    (torch.bfloat16, torch.float32, None, None),
    (torch.float32, torch.float32, None, torch.bfloat16),
]
VALUES = torch.arange(8.0)


def averages(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each case, the whole average and this rank's part of it."""
    axis = open_mesh(Layout()).gradient
    found = []
    for own, sent, factor, exchanged in CASES:
        averaging = Averaging(axis, sent, factor, exchanged)
        whole, divided = ((VALUES * (rank + 1)).to(own) for _ in range(2))
        part = averaging.start_local_part(divided).wait()
        found.append((averaging.average(whole), part))
    return found


def test_every_rank_has_the_average_or_its_part_of_it() -> None:
    for rank, found in enumerate(run_ranks(averages, 2)):
        for (_, sent, *_), (whole, part) in zip(CASES, found, strict=True):
            assert whole.dtype is sent and part.dtype is sent
            assert whole.tolist() == (VALUES * 1.5).tolist()
            assert part.tolist() == (VALUES * 1.5)[4 * rank : 4 * rank + 4].tolist()


@pytest.mark.parametrize("factor", [None, 4.0])
def test_alone_nothing_changes(factor: float | None) -> None:
    averaging = Averaging(Axis.single("gradient"), torch.bfloat16, factor)
    values = VALUES.clone()
    assert averaging.start_local_part(values).wait() is values
    assert averaging.average(values) is values and values.tolist() == VALUES.tolist()

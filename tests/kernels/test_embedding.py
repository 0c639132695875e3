"""Lookup of ids in a vocabulary shard and its gradient, compiled, compared with torch and float64."""

from __future__ import annotations

import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.embedding import lookup
from megatron.kernels.native.library import Library

CSRC = Implementation.CSRC


def _case(
    rows: int, columns: int, shape: tuple[int, ...], first_row: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    weight, gradient = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((rows, columns), (*shape, columns))
    )
    ids = torch.randint(first_row - rows // 4, first_row + rows + rows // 4 + 1, shape, generator=generator)
    ids.view(-1)[::3] = first_row  # one id that many positions have
    return weight.requires_grad_(), ids, gradient


def test_views_and_what_torch_knows(compiled: Library) -> None:
    weight, ids, _ = _case(6, 8, (4, 5), 2, torch.float64)
    assert torch.equal(
        lookup(weight.detach().t(), ids.t() - 2, implementation=CSRC, first_row=1),
        lookup(weight.detach().t(), ids.t() - 2, first_row=1, is_whole=False),
    )
    torch.library.opcheck(torch.ops.megatron.embedding.default, (weight, ids, 2))
    torch.library.opcheck(torch.ops.megatron.embedding_backward.default, (torch.randn(4, 5, 8), ids, 6, 2))
    assert torch.autograd.gradcheck(lambda table: lookup(table, ids, first_row=2, implementation=CSRC), [weight])

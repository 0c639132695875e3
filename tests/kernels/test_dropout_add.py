"""Bias, stateless dropout and residual; `devices` compares the compiled operation with the reference."""

from __future__ import annotations

import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.native.library import Library

DROPOUT = {"threshold": 6554, "column_base": 0x9E3779B97F4A7C15}


def _case(dtype: torch.dtype, *shape: int) -> tuple[list[torch.Tensor], Dropout, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (shape, shape[-1:], shape, shape)
    x, bias, residual, gradient = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    rows = torch.randint(-(2**62), 2**62, shape[:-1], generator=generator)
    return [part.requires_grad_() for part in (x, bias, residual)], Dropout(rows, **DROPOUT), gradient


def test_torch_knows_the_operation(compiled: Library) -> None:
    inputs, dropout, _ = _case(torch.float64, 2, 3, 5)
    settings = (dropout.rows, dropout.threshold, -7, 0.5)
    torch.library.opcheck(torch.ops.megatron.dropout_add.default, (*inputs, *settings))
    torch.library.opcheck(
        torch.ops.megatron.dropout_add_backward.default, (inputs[0].detach(), *settings, torch.float32)
    )
    assert torch.autograd.gradcheck(lambda *parts: torch.ops.megatron.dropout_add(*parts, *settings), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        x = inputs[0].bfloat16()
        mixed = dropout_add(x, dropout, bias=inputs[1].float(), implementation=Implementation.CSRC)
    assert mixed.dtype == torch.bfloat16


def test_everything_may_be_dropped() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    assert not dropout_add(torch.ones(2, 4), Dropout(rows, 65536, 1)).any()
    half = dropout_add(torch.ones(2, 4, dtype=torch.bfloat16), Dropout(rows, 100, 1))
    assert half.dtype == torch.bfloat16

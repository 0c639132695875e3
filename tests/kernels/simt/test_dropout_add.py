"""The kernels of bias, dropout and residual, executed without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.dropout_add import Dropout, dropout_add
from tests.kernels.simt import emulator

ROWS_PER_PART = 64
BASE = 0x1E3779B97F4A7C15


def _check(
    build: str, order: str, dtype: torch.dtype, rows: int, columns: int, shift: int, threshold: int = 6554
) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    x, residual, dy = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(3))
    bias = torch.randn(columns, generator=generator)
    hashes = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    dropout = Dropout(hashes, threshold, BASE) if threshold else None
    settings = (threshold, BASE, 0.75, None)
    with emulator.launch("dropout_add", build=build, order=order) as run:
        y, dx, dbias = run.output(x, shift=shift), run.output(x, shift=shift), run.output(bias)
        inputs = [run.input(part, shift) for part in (x, residual, dy)]
        own_bias, own_rows = run.input(bias), run.input(hashes) if threshold else None
        sizes = (own_rows, rows, columns, dtype, torch.float32, *settings)
        run.call("megatron_dropout_add_forward", y, inputs[0], own_bias, inputs[1], *sizes)
        scratch = run.scratch((-(-rows // ROWS_PER_PART), columns))
        run.call("megatron_dropout_add_backward", dx, dbias, scratch, inputs[2], *sizes)
        alone, plain = run.output(x, shift=shift), run.output(x)
        run.call("megatron_dropout_add_backward", alone, None, None, inputs[2], *sizes)
        run.call("megatron_dropout_add_forward", plain, inputs[0], None, None, *sizes)
    wide = [part.double().requires_grad_() for part in (x, bias)]
    exact = dropout_add(wide[0], dropout, bias=wide[1], residual=residual.double(), multiplier=0.75)
    gradients = torch.autograd.grad(exact, wide, dy.double())
    epsilon = torch.finfo(dtype).eps
    without = dropout_add(x.double(), dropout, multiplier=0.75)
    pairs = ((y, exact), (dx, gradients[0]), (plain, without))
    for found, expected in pairs:
        allowed = epsilon * (1 + expected.abs().max())
        assert (found.tensor().double() - expected).abs().max() <= allowed
    assert torch.equal(dx.tensor(), alone.tensor())
    assert (dbias.tensor().double() - gradients[1]).abs().max() <= 3e-6 * rows**0.5
    if dropout is not None:
        assert torch.equal(plain.tensor() == 0, ~dropout.kept(columns))
    if dtype == torch.float32:  # rounded like the composition of torch's operations
        assert torch.equal(y.tensor(), dropout_add(x, dropout, bias=bias, residual=residual, multiplier=0.75))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_agree_with_float64(dtype: torch.dtype) -> None:
    shapes = ((1, 1, 0), (3, 7, 1), (65, 8, 0), (2, 300, 0), (130, 24, 0))
    for number, (rows, columns, shift) in enumerate(shapes):
        order = ("forward", "reverse", "random")[number % 3]
        _check("checked", order, dtype, rows, columns, shift)
    _check("checked", "forward", dtype, 5, 16, 0, threshold=0)
    _check("checked", "forward", dtype, 5, 16, 0, threshold=65536)


def test_large_shapes() -> None:
    _check("plain", "random", torch.bfloat16, 700, 520, 0)
    _check("plain", "forward", torch.float32, 70, 1031, 3)

"""The CUDA source of dropout with bias and residual, run on a CPU: values, tails, alignments and every line."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.dropout_add import Dropout, dropout_add

BASE = 0x1234567890ABCDEF


def _check(run: emulator.Run, dtype: torch.dtype, rows: int, columns: int, shift: int, threshold: int) -> None:
    """Forward with all operands and with none, and backward, against the reference; float32 bit for bit."""
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2))
    bias = torch.randn(columns, generator=generator)
    dropout = Dropout(torch.randint(-(2**62), 2**62, (rows,), generator=generator), threshold, BASE)
    given, added, hashed = run.input(x, shift), run.input(residual, shift), run.input(dropout.rows)
    full, plain, gradient = (run.output(x, shift=shift) for _ in range(3))
    sizes = (hashed, rows, columns, dtype)
    forward = "megatron_dropout_add_forward"
    run.call(forward, full, given, run.input(bias), added, *sizes, torch.float32, threshold, BASE, 0.5, None)
    run.call(forward, plain, given, None, None, *sizes, torch.float32, threshold, BASE, 1.0, None)
    backward, rest = "megatron_dropout_add_backward", (torch.float32, threshold, BASE, 0.5, None)
    run.call(backward, gradient, None, None, given, *sizes, *rest)
    again, of_bias, parts = run.output(x, shift=shift), run.output(bias), run.output((-(-rows // 64), columns))
    run.call(backward, again, of_bias, parts, given, *sizes, *rest)
    exact = dropout_add(x.double(), dropout, bias=bias.double(), residual=residual.double(), multiplier=0.5)
    wide = dropout_add(x.float(), dropout, bias=bias, residual=residual.float(), multiplier=0.5)
    error = torch.finfo(dtype).eps
    torch.testing.assert_close(full.tensor().double(), exact, rtol=error, atol=4 * error)
    assert torch.equal(full.tensor(), wide.to(dtype))
    assert torch.equal(plain.tensor(), dropout_add(x.float(), dropout).to(dtype))
    expected = dropout_add(x.float(), dropout, multiplier=0.5)
    assert torch.equal(gradient.tensor(), expected.to(dtype)) and torch.equal(again.tensor(), gradient.tensor())
    torch.testing.assert_close(of_bias.tensor(), expected.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", list(emulator.ORDERS))
@pytest.mark.parametrize("dtype", list(emulator.DTYPE_CODES))
def test_values_where_every_access_is_checked(dtype: torch.dtype, order: str) -> None:
    cases = [(1, 1, 0, 6554), (3, 7, 1, 30000), (3, 16, 1, 6554), (2, 1031, 3, 0), (130, 16, 0, 65536), (5, 64, 0, 1)]
    for rows, columns, shift, threshold in cases:
        with emulator.launch("dropout_add", order=order) as run:
            _check(run, dtype, rows, columns, shift, threshold)


def test_large_inputs() -> None:
    """A million entries, in thousands of blocks."""
    with emulator.launch("dropout_add", "plain") as run:
        for dtype in emulator.DTYPE_CODES:
            _check(run, dtype, 257, 4099, 1, 6554)

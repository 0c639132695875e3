"""Bias, stateless dropout and residual: the reference and the compiled operation."""

from __future__ import annotations

import pytest
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


def _run(
    implementation: Implementation, inputs: list[torch.Tensor], dropout: Dropout | None, gradient: torch.Tensor
) -> list[torch.Tensor]:
    x, bias, residual = inputs
    y = dropout_add(x, dropout, bias=bias, residual=residual, multiplier=0.5, implementation=implementation)
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 2, 1030), (3, 129, 64)])
def test_compiled_equals_the_reference(compiled: Library, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, dropout, gradient = _case(dtype, *shape)
    for chosen in (dropout, None):
        expected = _run(Implementation.TORCH, inputs, chosen, gradient)
        found = _run(Implementation.CSRC, inputs, chosen, gradient)
        if dtype in (torch.float32, torch.float64):
            for one, other in zip(expected[:2], found[:2], strict=True):  # values and the gradient of x
                assert torch.equal(one, other)
        wide = [part.detach().double().requires_grad_() for part in inputs]
        exact = _run(Implementation.TORCH, wide, chosen, gradient.double())
        for reference, one, other in zip(exact, expected, found, strict=True):
            # The reference of float64 is itself rounded.
            ulps = 4 if dtype == torch.float64 else 1
            allowed = (one - reference).abs().max() * 1.1 + ulps * torch.finfo(dtype).eps * reference.abs().max()
            assert (other - reference).abs().max() <= allowed
    assert torch.equal(_run(Implementation.CSRC, inputs, dropout, gradient)[1] == 0, ~dropout.kept(shape[-1]))


def test_views_and_half_precision(compiled: Library) -> None:
    (x, _, _), dropout, _ = _case(torch.bfloat16, 2, 33, 65)
    wide = torch.randn(2, 65, 34, dtype=torch.bfloat16)
    transposed, offset = wide.transpose(1, 2)[:, 1:].float(), x.flatten()[2:].float().view(-1, 8)
    for view, chosen in ((transposed, dropout), (offset, None)):
        assert torch.equal(dropout_add(view, chosen, implementation=Implementation.CSRC), dropout_add(view, chosen))
    exact = dropout_add(x.double(), dropout, bias=wide[0, :, 0].double(), residual=x.double())
    errors = [
        (dropout_add(x, dropout, bias=wide[0, :, 0], residual=x, implementation=chosen) - exact).abs().max()
        for chosen in (Implementation.CSRC, Implementation.TORCH)
    ]
    assert errors[0] <= errors[1]


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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"residual": torch.zeros(2, 5)}, r"residual is Float\[2, 5\] and x is Float\[2, 4\]; both must have"),
        ({"bias": torch.zeros(3)}, "bias must have one entry for each of the 4 columns"),
    ],
)
def test_wrong_shapes_are_refused(compiled: Library, changes: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        dropout_add(torch.zeros(2, 4), multiplier=2.0, implementation=Implementation.CSRC, **changes)
    rows = Dropout(torch.zeros(3, dtype=torch.int64), **DROPOUT)
    with pytest.raises(RuntimeError, match=r"one entry for each row of x \[2, 4\]"):
        dropout_add(torch.zeros(2, 4), rows, implementation=Implementation.CSRC)


def test_everything_may_be_dropped() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    assert not dropout_add(torch.ones(2, 4), Dropout(rows, 65536, 1)).any()
    half = dropout_add(torch.ones(2, 4, dtype=torch.bfloat16), Dropout(rows, 100, 1))
    assert half.dtype == torch.bfloat16

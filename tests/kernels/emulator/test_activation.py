"""The kernels of activations, executed without a GPU."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.activations import FUNCTIONS, activation, gated

ROWS_PER_PART = 64
# Rows, columns, and by how many elements the tensors begin behind an aligned address.
SHAPES = ((1, 1, 0), (3, 7, 1), (3, 16, 1), (33, 8, 0), (2, 300, 0), (130, 24, 0))
EPSILON = {torch.float32: 3e-7, torch.bfloat16: 1 / 128, torch.float16: 1 / 1024}


def _case(rows: int, columns: int, is_gated: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shape = (rows, 2, columns) if is_gated else (rows, columns)
    x, bias, dy = (torch.randn(*size, generator=generator) for size in (shape, shape[1:], (rows, columns)))
    return (2 * x).to(dtype), bias.flatten(), dy.to(dtype)


def _check(build: str, order: str, name: str, is_gated: bool, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, columns, shift = shape
    x, bias, dy = _case(rows, columns, is_gated, dtype)
    bias_dtype = torch.float32 if dtype == torch.float32 else (dtype if columns % 2 else torch.float32)
    bias = bias.to(bias_dtype)
    has_bias = name != "relu"
    parts = -(-rows // ROWS_PER_PART)
    sizes = (rows, columns, FUNCTIONS[name], int(is_gated), dtype, bias_dtype, None)
    with emulator.launch("activation", build=build, order=order) as run:
        inputs = run.input(x, shift), run.input(bias) if has_bias else None
        y, dx = run.output(dy, shift=shift), run.output(x, shift=shift)
        run.call("megatron_activation_forward", y, *inputs, *sizes)
        dbias = run.output(bias) if has_bias else None
        scratch = run.scratch((parts, bias.numel())) if has_bias else None
        run.call("megatron_activation_backward", dx, dbias, scratch, run.input(dy), *inputs, *sizes)
    wide = [x.double().requires_grad_(), bias.double().requires_grad_()]
    exact = (gated if is_gated else activation)(wide[0], name, bias=wide[1] if has_bias else None)
    gradients = torch.autograd.grad(exact, wide[: 1 + has_bias], dy.double())
    found = [y.tensor(), dx.tensor()] + ([dbias.tensor()] if dbias is not None else [])
    for reference, one in zip((exact.detach(), *gradients), found, strict=True):
        allowed = EPSILON[one.dtype] * (1 + reference.abs().max())
        assert (one.double() - reference).abs().max() <= allowed


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("build", ["checked", "plain"])
def test_kernels_agree_with_float64(build: str, is_gated: bool) -> None:
    orders = ("forward", "reverse", "random")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for number, name in enumerate(FUNCTIONS):
        for offset, shape in enumerate(SHAPES):
            _check(build, orders[number % 3], name, is_gated, dtypes[(number + offset) % 3], shape)


def test_large_shapes() -> None:
    _check("plain", "forward", "silu", True, torch.bfloat16, (1100, 260, 0))
    _check("plain", "random", "gelu", False, torch.float32, (70, 4099, 3))
    for name in FUNCTIONS:
        for is_gated in (False, True):
            for dtype in emulator.DTYPE_CODES:
                _check("plain", "reverse", name, is_gated, dtype, (66, 40, 0))


def _every_number(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a half precision up to 30 in size, which covers where the functions bend."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return bits[bits.abs() <= 30]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gelu_tanh", "silu"])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    x = _every_number(dtype)
    sizes = (1, len(x), FUNCTIONS[name], 0, dtype, dtype, None)
    with emulator.launch("activation", build="plain", order="forward") as run:
        y, dx, dy = run.output(x), run.output(x), torch.ones_like(x)
        run.call("megatron_activation_forward", y, run.input(x), None, *sizes)
        run.call("megatron_activation_backward", dx, None, None, run.input(dy), run.input(x), None, *sizes)
    wide = x.double().requires_grad_()
    exact = activation(wide, name)
    (gradient,) = torch.autograd.grad(exact, wide, dy.double())
    half_a_digit = torch.finfo(dtype).eps / 2
    for found, reference in ((y.tensor(), exact.detach()), (dx.tensor(), gradient)):
        assert ((found.double() - reference).abs() <= 1.01 * half_a_digit * reference.abs() + 1e-7).all()


@pytest.mark.parametrize("name", ["gelu_tanh", "silu"])
def test_half_precision_at_its_ends(name: str) -> None:
    x = torch.tensor([-3e38, -1e20, -1e4, -89.0, 0.0, 89.0, 1e4, 1e20, float("nan")], dtype=torch.bfloat16)
    sizes = (1, len(x), FUNCTIONS[name], 0, x.dtype, x.dtype, None)
    with emulator.launch("activation", build="plain", order="forward") as run:
        y, dx, dy = run.output(x), run.output(x), torch.ones_like(x)
        run.call("megatron_activation_forward", y, run.input(x), None, *sizes)
        run.call("megatron_activation_backward", dx, None, None, run.input(dy), run.input(x), None, *sizes)
    below, above, last = slice(0, 4), slice(5, 8), 8
    assert (y.tensor()[below] == 0).all() and torch.equal(y.tensor()[above], x[above]) and y.tensor()[last].isnan()
    assert (dx.tensor()[1:4] == 0).all() and (dx.tensor()[above] == 1).all() and dx.tensor()[last].isnan()

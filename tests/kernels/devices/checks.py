"""Compares a differentiable operation of `csrc/ops` with float64: values, gradients, repetition, memory layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.kernels.choice import Implementation
from tests.kernels.devices.cases import Case

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# Largest error in parts of an entry's size plus the root mean square of all: a few roundings of the dtype, and of
# float32 sums of some thousand terms.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

Layout = Callable[[torch.Tensor], torch.Tensor]


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is made."""
    return tensor.contiguous()


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, no two of them side by side, and behind an odd offset."""
    if tensor.dim() == 0:
        return tensor
    room = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[..., 1::2]
    view.copy_(tensor)
    return view


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in one block that begins one element behind a boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


LAYOUTS: tuple[Layout, ...] = (contiguous, scattered, shifted)


def check_case(case: Case, dtype: torch.dtype, device: str, layout: Layout) -> None:
    """Demands right values and gradients in a memory layout, and the same bits from a second run."""
    rounded = {name: value.to(dtype) for name, value in case.inputs.items()}
    exact_inputs = {name: value.double().requires_grad_() for name, value in rounded.items()}
    exact = case.compute(exact_inputs, Implementation.TORCH)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(output.shape, generator=generator).to(dtype) for output in exact]
    expected = [*exact, *torch.autograd.grad(exact, list(exact_inputs.values()), [w.double() for w in weights])]
    names = [f"output {number}" for number in range(len(exact))] + [f"gradient of {name}" for name in rounded]
    results = []
    for _ in range(2):
        inputs = {name: layout(value.to(device)).requires_grad_() for name, value in rounded.items()}
        outputs = case.compute(inputs, Implementation.CSRC)
        gradients = torch.autograd.grad(outputs, list(inputs.values()), [layout(w.to(device)) for w in weights])
        results.append([*outputs, *gradients])
    where = f"{case.label}, {dtype}, {layout.__name__}"
    for name, first, second, true in zip(names, *results, expected, strict=True):
        check_close(first.detach(), true.detach(), dtype, f"{name} of {where}")
        assert same_bits(first, second), f"{name} is not repeatable: {where}"


def check_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Compares with float64, in parts of an entry's size and of the usual one."""
    assert found.dtype == dtype and found.shape == expected.shape, f"{found.dtype} {found.shape}: {where}"
    if not found.numel():
        return
    usual = expected.square().mean().sqrt()
    errors = (found.cpu().double() - expected).abs() / (expected.abs() + usual).clamp(min=1e-30)
    worst = float(errors.nan_to_num(nan=float("inf")).max())
    assert worst <= TOLERANCES[dtype], f"an error of {worst:.1e}: {where}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    views = [torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.detach().flatten()) for t in (one, other)]
    return torch.equal(*(view.view(torch.uint8) for view in views))

"""Compares a differentiable operation of `csrc/ops` with float64: values, gradients, repetition, memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    """Compares values and gradients in a memory layout with float64 and with torch's error, over numbers of threads."""
    rounded = {name: value.to(dtype) for name, value in case.inputs.items()}
    exact_inputs = {name: value.double() for name, value in rounded.items()}
    generator = torch.Generator().manual_seed(2)
    shapes = [output.shape for output in case.compute(exact_inputs, Implementation.TORCH)]
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    expected = _results(case, exact_inputs, [weight.double() for weight in weights], Implementation.TORCH)
    usual = _results(case, rounded, weights, Implementation.TORCH)
    names = [f"output {number}" for number in range(len(shapes))] + [f"gradient of {name}" for name in rounded]
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            inputs = {name: layout(value.to(device)) for name, value in rounded.items()}
            results.append(_results(case, inputs, [layout(w.to(device)) for w in weights], Implementation.CSRC))
    finally:
        torch.set_num_threads(threads)
    where = f"{case.label}, {dtype}, {layout.__name__}"
    largest = max((float(part.abs().max()) for part in (*expected, *weights) if part.numel()), default=0.0)
    for name, first, second, true, other in zip(names, *results, expected, usual, strict=True):
        check_close(first, true, dtype, f"{name} of {where}")
        assert same_bits(first, second), f"{name} is not repeatable: {where}"
        if device == "cpu" and first.numel():
            ulps = 4 if dtype == torch.float32 else 1
            allowed = 1.1 * (other - true).abs().max() + ulps * torch.finfo(dtype).eps * largest
            assert (first - true).abs().max() <= allowed, f"{name} is less exact than torch's: {where}"


def _results(
    case: Case, inputs: Mapping[str, torch.Tensor], weights: Sequence[torch.Tensor], implementation: Implementation
) -> list[torch.Tensor]:
    """The outputs, and the gradients of the inputs."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    outputs = case.compute(leaves, implementation)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return [part.detach() for part in (*outputs, *gradients)]


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
    """True if two tensors are bitwise equal."""
    views = [torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.detach().flatten()) for t in (one, other)]
    return torch.equal(*(view.view(torch.uint8) for view in views))

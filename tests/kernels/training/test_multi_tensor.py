"""Norms and sums of lists of tensors, compared with float64 and with torch."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.multi_tensor import add_, norm, square_sum
from megatron.kernels.native.library import Library

CSRC, TORCH = Implementation.CSRC, Implementation.TORCH
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _list(dtype: torch.dtype) -> list[torch.Tensor]:
    """Mixed sizes: empty, one element, odd, over a chunk of a task; one transposed and one behind an offset."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(0,), (1,), (7, 11), (3, 12347), (64, 33)]
    values = [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
    return [*values, values[2].t(), values[3].flatten()[5:30000], torch.randn((), generator=generator).to(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_those_of_float64(compiled: Library, dtype: torch.dtype) -> None:
    """Parts of more elements than torch may reduce at once, too."""
    tensors = [*_list(dtype), torch.randn(3, 1 << 16).to(dtype)]
    exact = float(sum(tensor.double().square().sum() for tensor in tensors))
    for implementation, tolerance in ((TORCH, 1e-12), (CSRC, 2.0**-22)):
        total = square_sum(tensors, implementation=implementation)
        assert total.dtype == torch.float64 and float(total) == pytest.approx(exact, rel=tolerance)
    assert math.isnan(float(square_sum([torch.tensor([1.0, math.nan])])))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_may_leave_the_range_of_float32(compiled: Library, size: float) -> None:
    assert float(norm([torch.full((3000,), size)], implementation=CSRC)[0]) == pytest.approx(size * math.sqrt(3000))


def test_many_elements_stay_exact(compiled: Library) -> None:
    """A float32 sum of ones ends at 2^24; the same memory is listed so often that the sum passes 2^31."""
    ones = torch.ones(1 << 20)
    assert float(norm([ones] * 2049, implementation=CSRC)[0]) == pytest.approx(math.sqrt(2049 * 2**20), rel=1e-7)


def test_torch_knows_the_operations(compiled: Library) -> None:
    tensors = [torch.randn(3, 5), torch.randn(4)]
    operations = torch.ops.megatron
    torch.library.opcheck(operations.multi_tensor_norm.default, (tensors, True))
    torch.library.opcheck(operations.multi_tensor_add_.default, (list(map(torch.zeros_like, tensors)), tensors))


@pytest.mark.parametrize("implementation", [CSRC, TORCH])
def test_a_list_without_tensors_is_refused(compiled: Library, implementation: Implementation) -> None:
    for refused in (norm, square_sum):
        with pytest.raises(ValueError, match="got an empty list"):
            refused([], implementation=implementation)
    add_([], [], implementation=implementation)

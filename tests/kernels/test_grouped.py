"""Grouped products equal a product per group; empty groups get zeros; torch's kernel gives the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.kernels import grouped
from megatron.kernels.grouped import grouped_linear

ROWS, INPUT, OUTPUT = 24, 16, 8
ENDS = {"all filled": [3, 10, 11, 24], "empty ones": [0, 10, 10, 24, 24], "one group": [0, 24, 24], "one": [24]}


def operands(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, weight = torch.randn(ROWS, INPUT, generator=generator), torch.randn(count, OUTPUT, INPUT, generator=generator)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def expected(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    """Result and gradients in float64, row by row."""
    rows, matrices = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    group_of = [next(group for group, end in enumerate(ends) if row < end) for row in range(ROWS)]
    result = torch.stack([matrices[group] @ row for group, row in zip(group_of, rows, strict=True)])
    result.square().sum().backward()
    return [result.detach(), rows.grad, matrices.grad]  # type: ignore[list-item]


def found(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    result = grouped_linear(x, weight, torch.tensor(ends))
    result.square().sum().backward()
    return [result.detach(), x.grad, weight.grad]  # type: ignore[list-item]


@pytest.fixture(params=[False, True], ids=["loop", "kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product per group, and torch's kernel."""
    if request.param and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no such kernel")
    monkeypatch.setattr(grouped, "_has_grouped_kernel", lambda *_: request.param)


@pytest.mark.parametrize("dtype, ratio", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.usefixtures("kernel")
def test_a_bias_of_each_group(ends: list[int], dtype: torch.dtype, ratio: float) -> None:
    x, weight = operands(len(ends), dtype)
    bias = torch.randn(len(ends), OUTPUT, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()
    gradient = torch.randn(ROWS, OUTPUT, generator=torch.Generator().manual_seed(8)).to(dtype)
    result = grouped_linear(x, weight, torch.tensor(ends), bias)
    result.backward(gradient)
    edges = list(itertools.pairwise([0, *ends]))
    sums = torch.stack([gradient[first:last].double().sum(dim=0) for first, last in edges])
    added = torch.cat([bias[group].expand(last - first, -1) for group, (first, last) in enumerate(edges)])
    known = expected(x, weight, ends)[0] + added.double()
    assert (result.double() - known).abs().max() <= ratio * known.abs().max()
    assert bias.grad is not None and (bias.grad.double() - sums).abs().max() <= ratio * sums.abs().max()
    x_only, weight_only = (value.grad for value in (x, weight))
    x.grad = weight.grad = None
    grouped_linear(x, weight, torch.tensor(ends)).backward(gradient)
    assert torch.equal(x.grad, x_only) and torch.equal(weight.grad, weight_only)


@pytest.mark.parametrize("dtype, ratio", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.usefixtures("kernel")
def test_result_and_gradients(ends: list[int], dtype: torch.dtype, ratio: float) -> None:
    x, weight = operands(len(ends), dtype)
    for value, known in zip(found(x, weight, ends), expected(x, weight, ends), strict=True):
        assert (value.double() - known).abs().max() <= ratio * known.abs().max()
    empty = [group for group, end in enumerate(ends) if end == (ends[group - 1] if group else 0)]
    assert not weight.grad[empty].any()


@pytest.mark.parametrize("generation", [0, 9, 10])
def test_without_rows_no_kernel_is_called(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of any rank chose the experts of this one."""
    monkeypatch.setattr(grouped, "_generation", lambda x: generation)
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    monkeypatch.setattr(torch, "_grouped_mm", lambda *_, **__: pytest.fail("a kernel without rows"), raising=False)
    x = torch.empty(0, INPUT, dtype=torch.bfloat16, requires_grad=True)
    weight = operands(2, torch.bfloat16)[1]
    result = grouped_linear(x, weight, torch.tensor([0, 0]))
    result.sum().backward()
    assert result.shape == (0, OUTPUT) and x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    ("generation", "version", "expected"),
    [
        (0, "2.13.0+cpu", False),
        (8, "2.13.0", False),
        (9, "2.8.0", True),
        (9, "2.13.0+cu130", True),
        (10, "2.8.0", False),
        (10, "2.9.0+cu128", True),
        (10, "2.15.0", True),
        (11, "2.15.0", False),
        (12, "2.15.0", False),
    ],
)
def test_gpus_on_which_torchs_kernel_is_known_good(
    generation: int, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch, "_grouped_mm", None, raising=False)
    x, weight = operands(2, torch.bfloat16)
    assert grouped._has_grouped_kernel(x, weight, generation) is expected
    assert not grouped._has_grouped_kernel(x.float(), weight.float(), generation)
    assert not grouped._has_grouped_kernel(x[:, :12], weight[:, :, :12], generation)


def test_without_torchs_kernel_there_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.7 has no such kernel."""
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    monkeypatch.setattr(grouped, "_generation", lambda x: 9)
    x, weight = operands(4, torch.bfloat16)
    ends = ENDS["all filled"]
    for value, known in zip(found(x, weight, ends), expected(x, weight, ends), strict=True):
        assert (value.double() - known).abs().max() <= 2e-2 * known.abs().max()


class _KernelOfBlackwell(torch.autograd.Function):
    """Torch's kernel, which leaves the gradients of empty groups as the memory was."""

    @staticmethod
    def forward(ctx, x, weight, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, ends)
        starts = [0, *ends.tolist()]
        return torch.cat([x[starts[i] : starts[i + 1]] @ weight[i] for i in range(len(ends))])

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, ends = ctx.saved_tensors
        starts = [0, *ends.tolist()]
        groups = [slice(*pair) for pair in itertools.pairwise(starts)]
        of_x = torch.cat([gradient[rows] @ weight[group].t() for group, rows in enumerate(groups)])
        of_weight = torch.full_like(weight, float("nan"))
        for group, rows in enumerate(groups):
            if rows.start < rows.stop:
                of_weight[group] = x[rows].t() @ gradient[rows]
        return of_x, of_weight, None


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_empty_groups_have_no_gradient_on_blackwell(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_generation", lambda x: 10)
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    calls = []

    def kernel(self, mat2, offs=None, bias=None, out_dtype=None):  # type: ignore[no-untyped-def]
        calls.append(offs.dtype)  # the signature of torch 2.8 to 2.15
        return _KernelOfBlackwell.apply(self, mat2, offs)

    monkeypatch.setattr(torch, "_grouped_mm", kernel, raising=False)
    x, weight = operands(len(ends), torch.bfloat16)
    for value, known in zip(found(x, weight, ends), expected(x, weight, ends), strict=True):
        assert (value.double() - known).abs().max() <= 2e-2 * known.abs().max()
    assert calls == [torch.int32]


@pytest.mark.gpu
def test_without_rows_on_a_gpu() -> None:
    weight = operands(2, torch.bfloat16)[1].detach().cuda().requires_grad_()
    x = torch.empty(0, INPUT, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grouped_linear(x, weight, torch.tensor([0, 0], device="cuda")).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_result_and_gradients_on_a_gpu(ends: list[int]) -> None:
    cpu = operands(len(ends), torch.bfloat16)
    x, weight = (part.detach().cuda().requires_grad_() for part in cpu)
    result = grouped_linear(x, weight, torch.tensor(ends, device="cuda"))
    result.square().sum().backward()
    for value, known in zip((result.detach(), x.grad, weight.grad), expected(*cpu, ends), strict=True):
        assert (value.cpu().double() - known).abs().max() <= 2e-2 * known.abs().max()


def test_torchs_kernel_has_the_signature_that_is_called() -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no such kernel")
    x, weight = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        shape = torch._grouped_mm(
            *map(mode.from_tensor, (x, weight)), offs=mode.from_tensor(torch.tensor([1, 4]).int())
        )
    assert shape.shape == (4, 8) and shape.dtype == torch.bfloat16

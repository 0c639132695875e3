"""The operations of megatron/kernels as the benchmarks call them: inputs of a size, and the bytes that must be moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout, dropout_add

Outputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operation on given inputs.

    Attributes:
        operation: its field in `Kernels`, and its folder in csrc/ops.
        label: the variant and the shape.
        compute: the forward pass by one of the implementations.
        inputs: what gets a gradient; empty if the operation has no backward pass.
        forward_bytes: the fewest bytes that a forward pass reads and writes.
        backward_bytes: the same of the backward pass.
    """

    operation: str
    label: str
    compute: Callable[[Implementation], Outputs]
    inputs: tuple[torch.Tensor, ...]
    forward_bytes: int
    backward_bytes: int

    def forward(self, implementation: Implementation) -> None:
        """The forward pass, as in evaluation."""
        with torch.no_grad():
            self.compute(implementation)

    def both(self, implementation: Implementation) -> None:
        """The forward and the backward pass; the outputs themselves serve as their gradients."""
        outputs = self.compute(implementation)
        torch.autograd.grad(outputs, self.inputs, [output.detach() for output in outputs])


@dataclass(frozen=True)
class Size:
    """Rows (tokens) and columns (channels) of the values of an operation."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _random(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(*shape, dtype=like.dtype, device=like.device).requires_grad_()


def _dropout_add_cases(size: Size, like: torch.Tensor) -> list[Case]:
    x, residual = (_random(size.rows, size.columns, like=like) for _ in range(2))
    bias = _random(size.columns, like=like)
    rows = torch.randint(-(2**62), 2**62, (size.rows,), device=like.device)
    dropout = Dropout(rows, threshold=6554, column_base=0x9E3779B97F4A7C15)

    def with_dropout(implementation: Implementation) -> Outputs:
        return [dropout_add(x, dropout, bias=bias, residual=residual, implementation=implementation)]

    def without(implementation: Implementation) -> Outputs:
        return [dropout_add(x, bias=bias, residual=residual, implementation=implementation)]

    forward, backward = size_of(x, residual, bias, x), size_of(x, x, bias)
    inputs = (x, bias, residual)
    return [
        Case("dropout_add", f"dropout 0.1, {size}", with_dropout, inputs, forward, backward),
        Case("dropout_add", f"bias and residual, {size}", without, inputs, forward, backward),
    ]


CASES: dict[str, Callable[[Size, torch.Tensor], list[Case]]] = {
    "dropout_add": _dropout_add_cases,
}


def cases(operation: str, size: Size, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The variants of an operation that are measured, on random inputs."""
    torch.manual_seed(7)
    return CASES[operation](size, torch.empty(0, dtype=dtype, device=device))

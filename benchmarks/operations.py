"""The operations of megatron/kernels as the benchmarks call them: inputs of a size, and the bytes to be moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.kernels import multi_tensor
from megatron.kernels.activations import activation, gated
from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, logit_gradient, logit_statistics
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.embedding import lookup
from megatron.kernels.initial_values import WeightDraw, draw_
from megatron.kernels.norms import add_norm, layer_norm, rms_norm
from megatron.kernels.optimizer import build_adamw
from megatron.kernels.rotary import rotate_both

Outputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operation on given inputs.

    Attributes:
        operation: its folder in csrc/ops.
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


def _activation_cases(size: Size, like: torch.Tensor) -> list[Case]:
    x, bias = _random(size.rows, size.columns, like=like), _random(size.columns, like=like)
    pairs = _random(size.rows, 2, size.columns, like=like)

    def gelu(implementation: Implementation) -> Outputs:
        return [activation(x, "gelu_tanh", bias=bias, implementation=implementation)]

    def swiglu(implementation: Implementation) -> Outputs:
        return [gated(pairs, "silu", implementation=implementation)]

    one = size_of(x)
    return [
        Case("activation", f"bias and GELU (tanh), {size}", gelu, (x, bias), 2 * one, 3 * one),
        Case("activation", f"SwiGLU, {size}", swiglu, (pairs,), 3 * one, 5 * one),
    ]


def _norm_cases(size: Size, like: torch.Tensor) -> list[Case]:
    x, residual = (_random(size.rows, size.columns, like=like) for _ in range(2))
    weight, bias, branch_bias = (_random(size.columns, like=like) for _ in range(3))

    def layer(implementation: Implementation) -> Outputs:
        return [layer_norm(x, weight, bias, 1e-5, implementation=implementation)]

    def root_mean_square(implementation: Implementation) -> Outputs:
        return [rms_norm(x, weight, 1e-5, implementation=implementation)]

    def added(implementation: Implementation) -> Outputs:
        return add_norm(x, residual, weight, bias, 1e-5, subtract_mean=True, implementation=implementation)

    def biased(implementation: Implementation) -> Outputs:
        given: dict[str, Any] = {"branch_bias": branch_bias, "implementation": implementation}
        return add_norm(x, residual, weight, bias, 1e-5, subtract_mean=True, **given)

    one = size_of(x)
    return [
        Case("norm", f"layer norm, {size}", layer, (x, weight, bias), 2 * one, 3 * one),
        Case("norm", f"RMS norm, {size}", root_mean_square, (x, weight), 2 * one, 3 * one),
        Case("norm", f"residual and layer norm, {size}", added, (x, residual, weight, bias), 4 * one, 4 * one),
        Case(
            "norm",
            f"bias, residual and layer norm, {size}",
            biased,
            (x, residual, weight, bias, branch_bias),
            4 * one,
            4 * one,
        ),
    ]


def _rotary_cases(size: Size, like: torch.Tensor) -> list[Case]:
    heads, length = max(1, size.columns // _HEAD), min(size.rows, 1024)
    batch = max(1, size.rows // length)
    query = _random(batch, heads, length, _HEAD, like=like)
    key = _random(batch, max(1, heads // 4), length, _HEAD, like=like)
    angles = torch.rand(1, 1, length, _HEAD // 2, device=like.device) * 6.28
    cos, sin = angles.cos(), angles.sin()

    def rotary(implementation: Implementation) -> Outputs:
        return rotate_both(query, key, cos, sin, implementation=implementation)

    moved = 2 * size_of(query, key)
    return [
        Case("rotary", f"query and key, {batch} x {heads} x {length} x {_HEAD}", rotary, (query, key), moved, moved)
    ]


def _softmax_cases(size: Size, like: torch.Tensor) -> list[Case]:
    length = min(size.columns, size.rows)
    heads = max(1, size.rows // length)
    scores = _random(1, heads, length, length, like=like)
    mask = torch.rand(1, 1, length, length, device=like.device) < 0.3
    later = torch.ones(1, 1, length, length, dtype=torch.bool, device=like.device).triu_(1)
    rows = torch.randint(-(2**62), 2**62, (1, heads, length), device=like.device)
    dropout = Dropout(rows, threshold=6554, column_base=0x9E3779B97F4A7C15)

    def case_of(hidden: torch.Tensor, dropout: Dropout | None, **options: Any) -> Callable[[Implementation], Outputs]:
        bias = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))

        def compute(implementation: Implementation) -> Outputs:
            if implementation is Implementation.TORCH:  # as explicit attention composes it, whose masks are biases
                return [dropout_add(torch.add(bias, scores, alpha=0.125).softmax(dim=-1), dropout)]
            return [scaled_softmax(scores, 0.125, dropout=dropout, implementation=implementation, **options)]

        return compute

    causal, masked = case_of(later, None, causal=True), case_of(mask, None, mask=mask)
    dropped = case_of(later, dropout, causal=True)
    one, shape = size_of(scores), f"{heads} x {length} x {length}"
    # A causal mask leaves half of the scores to be read; everything is written.
    return [
        Case("softmax", f"causal, {shape}", causal, (scores,), one * 3 // 2, 2 * one),
        Case("softmax", f"masked, {shape}", masked, (scores,), 2 * one + size_of(mask), 3 * one),
        Case("softmax", f"causal, dropout 0.1, {shape}", dropped, (scores,), one * 5 // 2, 2 * one),
    ]


def _cross_entropy_cases(size: Size, like: torch.Tensor) -> list[Case]:
    logits = torch.randn(size.rows, size.columns, dtype=like.dtype, device=like.device)
    labels = torch.randint(0, size.columns, (size.rows,), device=like.device)
    normalizer, weights = logits.float().logsumexp(dim=1), torch.rand(size.rows, device=like.device)

    def statistics(implementation: Implementation) -> Outputs:
        return [logit_statistics(logits, labels, size.columns, implementation=implementation).total]

    def gradient(implementation: Implementation) -> Outputs:
        of = LossGradients(weights)
        return [
            logit_gradient(logits, labels, normalizer, of, size.columns, size.columns, implementation=implementation)
        ]

    one = size_of(logits)
    return [
        Case("cross_entropy", f"statistics of rows, {size}", statistics, (), one, 0),
        Case("cross_entropy", f"gradient of logits, {size}", gradient, (), 2 * one, 0),
    ]


def _embedding_cases(size: Size, like: torch.Tensor) -> list[Case]:
    weight = _random(_VOCABULARY, size.columns, like=like)
    # Few ids are frequent, as in text.
    ids = (torch.rand(size.rows, device=like.device) ** 4 * _VOCABULARY).long()

    def embedding(implementation: Implementation) -> Outputs:
        return [lookup(weight, ids, implementation=implementation)]

    rows = size.rows * size.columns * like.element_size()
    return [Case("embedding", f"of {_VOCABULARY}, {size}", embedding, (weight,), 2 * rows, rows + size_of(weight))]


def _initial_value_cases(size: Size, like: torch.Tensor) -> list[Case]:
    shape = (size.rows, size.columns)
    draw = WeightDraw(shape, (0, 0), shape, base=0x1234567887654321, deviation=0.02)
    target = torch.empty(size.rows * size.columns, dtype=like.dtype, device=like.device)

    def initial_values(implementation: Implementation) -> Outputs:
        return [draw_(target, draw, implementation=implementation)]

    return [Case("initial_values", f"normal, {size}", initial_values, (), size_of(target), 0)]


def _adamw_cases(size: Size, like: torch.Tensor) -> list[Case]:
    """Flat float32 weights, moments and gradients, as the engine's partitions are."""
    count = size.rows * size.columns
    optimizers = {}
    for implementation in (Implementation.TORCH, Implementation.CSRC):
        weight = torch.nn.Parameter(torch.randn(count, device=like.device))
        weight.grad = torch.randn(count, device=like.device) * 1e-3
        groups = [{"params": [weight], "weight_decay": 0.1, "eps": 1e-8}]
        optimizers[implementation] = build_adamw(groups, lr=1e-4, betas=(0.9, 0.95), implementation=implementation)

    def adamw(implementation: Implementation) -> Outputs:
        optimizers[implementation].step()
        return []

    return [Case("adamw", f"float32, {count}", adamw, (), 7 * 4 * count, 0)]


def _multi_tensor_cases(size: Size, like: torch.Tensor) -> list[Case]:
    tensors = [torch.randn(size.rows, size.columns, dtype=like.dtype, device=like.device) for _ in range(4)]
    wide = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]

    def norm(implementation: Implementation) -> Outputs:
        return [multi_tensor.norm(tensors, implementation=implementation)[0]]

    def add(implementation: Implementation) -> Outputs:
        multi_tensor.add_(wide, tensors, implementation=implementation)
        return wide

    read, label = size_of(*tensors), f"4 tensors of {size}"
    return [
        Case("multi_tensor", f"norm, {label}", norm, (), read, 0),
        Case("multi_tensor", f"add to float32, {label}", add, (), read + 2 * size_of(*wide), 0),
    ]


_VOCABULARY = 50304
_HEAD = 64  # channels of an attention head

CASES: Mapping[str, Callable[[Size, torch.Tensor], list[Case]]] = MappingProxyType(
    {
        "activation": _activation_cases,
        "adamw": _adamw_cases,
        "cross_entropy": _cross_entropy_cases,
        "dropout_add": _dropout_add_cases,
        "embedding": _embedding_cases,
        "initial_values": _initial_value_cases,
        "multi_tensor": _multi_tensor_cases,
        "norm": _norm_cases,
        "rotary": _rotary_cases,
        "softmax": _softmax_cases,
    }
)


def cases(operation: str, size: Size, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The variants of an operation that are measured, on random inputs."""
    torch.manual_seed(7)
    return CASES[operation](size, torch.empty(0, dtype=dtype, device=device))

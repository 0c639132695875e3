"""The CUDA kernels of the norms, run on a CPU by the emulator, compared with their formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from csrc.emulator import emulator

EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """Inputs of one kernel; `shift` elements lie between a 16-byte boundary and all buffers, or the one of a name."""

    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    is_layer_norm: bool = True
    has_residual: bool = False
    branch_dtype: torch.dtype | None = None  # of the branch's bias, which is added too
    zero_centered: bool = False
    shift: int = 0
    shifted: str = ""

    def late(self, name: str) -> int:
        return self.shift if self.shifted in ("", name) else 0


HALF, BRAIN = torch.float16, torch.bfloat16
SMALL = [
    Case(9, 64),  # a warp to a row, eight rows at a time
    Case(3, 264, BRAIN, is_layer_norm=False, has_residual=True),  # two warps to a row
    Case(3, 264, BRAIN),  # which meet twice
    Case(2, 2304, BRAIN, shift=1, shifted="partials"),
    Case(5, 32, HALF, HALF, has_residual=True, zero_centered=True),
    Case(9, 64, HALF, has_residual=True, branch_dtype=torch.float32),
    Case(4, 7, BRAIN, has_residual=True, branch_dtype=BRAIN),
    Case(4, 7, BRAIN, BRAIN, shift=1),  # not packed: rows begin anywhere
    Case(3, 133, is_layer_norm=False, has_residual=True, branch_dtype=torch.float32, zero_centered=True),
    Case(2, 48, HALF, shift=3),
    Case(1, 1, BRAIN, is_layer_norm=False),
    Case(2, 4097),  # streamed
    Case(1, 4098, is_layer_norm=False, has_residual=True, branch_dtype=torch.float32),
    *(
        Case(2, 32, BRAIN, has_residual=True, branch_dtype=BRAIN, shift=1, shifted=name)
        for name in ("x", "residual", "weight", "bias", "branch", "y", "total", "dx", "dy", "past")
    ),
]
LARGE = [
    Case(
        4100, 8, BRAIN, BRAIN, has_residual=True, branch_dtype=torch.float32
    ),  # more blocks of rows than run at once, several rows to a block of the gradient
    Case(3, 2304, has_residual=True, branch_dtype=torch.float32),  # two packets to a thread
    Case(3, 2304, BRAIN, BRAIN, has_residual=True, branch_dtype=BRAIN),  # in the gradient only
    Case(2, 4608, is_layer_norm=False),  # four
    Case(2, 8192, BRAIN, BRAIN, has_residual=True, branch_dtype=torch.float32, zero_centered=True),
    Case(2, 8200, HALF, has_residual=True, branch_dtype=HALF),  # four, which do not sum the gradient of x
    Case(2, 4100, has_residual=True, branch_dtype=torch.float32),  # which do
    Case(2, 8448, HALF, is_layer_norm=False, zero_centered=True),
    Case(2060, 6, has_residual=True, branch_dtype=torch.float32),
    Case(2, 2237, BRAIN, BRAIN, has_residual=True),  # not packed: a packet to a thread
    Case(3, 2305, has_residual=True, branch_dtype=torch.float32, shift=1),  # two
    Case(19, 4609, has_residual=True, branch_dtype=torch.float32),  # streamed, more rows than threads to a column
    Case(2, 8191, HALF, HALF, zero_centered=True),
    Case(2, 8193, BRAIN),
]


def _formula(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, case: Case
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The norm in float64, rounded between where the kernels round; mean and inverse deviation of each row."""
    mean = x.mean(-1, keepdim=True) if case.is_layer_norm else torch.zeros(x.shape[0], 1, dtype=x.dtype)
    inverse = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * inverse * (weight + 1 if case.zero_centered else weight)
    return y if bias is None else y + bias, mean if case.is_layer_norm else None, inverse


def _check(found: torch.Tensor, expected: torch.Tensor, ulps: float = 2) -> None:
    """Compares with a tolerance in units of the last place of the largest value."""
    allowed = ulps * max(torch.finfo(found.dtype).eps, 1e-6) * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected, atol=allowed, rtol=0)


def _run(case: Case, build: str, order: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (case.rows, case.columns)
    x, residual, dy, dtotal = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(4))
    weight, bias = (torch.randn(case.columns, generator=generator).to(case.weight_dtype) for _ in range(2))
    branch = None if case.branch_dtype is None else torch.randn(case.columns, generator=generator).to(case.branch_dtype)
    total = x
    if case.has_residual:  # rounded once
        total = (x.float() + (0.0 if branch is None else branch.float()) + residual.float()).to(case.dtype)
    leaves = [part.double().requires_grad_() for part in (total, weight, bias)]
    with_bias = case.is_layer_norm
    y, mean, inverse = _formula(leaves[0], leaves[1], leaves[2] if with_bias else None, case)
    y.backward(dy.double())
    of_x, of_weight, of_bias = (leaf.grad for leaf in leaves)
    assert of_x is not None and of_weight is not None
    codes = (int(case.zero_centered), case.dtype, case.weight_dtype, case.branch_dtype or torch.float32, None)
    with emulator.launch("norm", build, order) as run:
        named = zip((total, residual, dy, dtotal), ("x", "residual", "dy", "past"), strict=True)
        inputs = [run.input(part, case.late(name)) for part, name in named]
        scale = run.input(weight, case.late("weight"))
        offset = run.input(bias, case.late("bias")) if with_bias else None
        statistics = [run.output((case.rows,)) if with_bias else None, run.output((case.rows,))]
        results = run.output(x, shift=case.late("y"))
        sums = run.output(x, shift=case.late("total")) if case.has_residual else None
        first = run.input(x, case.late("x")) if case.has_residual else inputs[0]
        added = inputs[1] if case.has_residual else None
        vectors = scale, offset, None if branch is None else run.input(branch, case.late("branch"))
        run.call("megatron_norm_forward", results, sums, *statistics, first, added, *vectors, *shape, EPS, *codes)
        row_blocks = -(-case.rows // -(-case.rows // 256))
        count = 1 + with_bias + (branch is not None)
        partials = run.scratch((count, row_blocks, case.columns), shift=case.late("partials"))
        gradients = [run.output(x, shift=case.late("dx")), run.output(weight)]
        gradients += [run.output(weight) if with_bias else None, None if branch is None else run.output(branch)]
        past = inputs[3] if case.has_residual else None
        given = (partials, inputs[2], past, inputs[0], scale, *statistics)
        run.call("megatron_norm_backward", *gradients, *given, *shape, *codes)
    _check(results.tensor(), y.detach(), ulps=3)
    if sums is not None:
        assert torch.equal(sums.tensor(), total)
        of_x = of_x + dtotal.double()
    for buffer, expected in zip(statistics, (mean, inverse), strict=True):
        if buffer is not None and expected is not None:
            _check(buffer.tensor(), expected.detach().squeeze(1))
    for buffer, expected in zip(gradients, (of_x, of_weight, of_bias, of_x.sum(0)), strict=True):
        if buffer is not None and expected is not None:
            _check(buffer.tensor(), expected, ulps=3)


@pytest.mark.parametrize("order", ["forward", "random"])
def test_checked(order: str) -> None:
    for case in SMALL:
        _run(case, "checked", order)


def test_large_rows() -> None:
    for case in SMALL + LARGE:
        _run(case, "plain", "reverse")

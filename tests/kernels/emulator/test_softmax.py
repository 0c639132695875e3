"""The CUDA kernels of the softmax, run in the emulator, against float64."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.dropout_add import Dropout
from megatron.processor import cpu_features

SCALE = 0.37
COLUMN_BASE = 0x9E3779B97F4A7C15
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """Scores `[b, a, q, k]`, how they are bounded, and by how many elements buffers miss a 16-byte boundary.

    Either all buffers do, or the one that `shifted` names.
    """

    shape: tuple[int, int, int, int]
    causal: bool = False
    mask: tuple[int, int, int] | None = None
    bias: tuple[int, int, int] | None = None
    float_bias: bool = True
    threshold: int = 0
    shift: int = 0
    shifted: str = ""

    def shift_of(self, name: str) -> int:
        return self.shift if self.shifted in ("", name) else 0


# Rows of one warp (at most 512 keys), of a block, and longer than registers hold (8192), in packets and one by one.
CASES = (
    Case((1, 1, 1, 1)),
    Case((2, 2, 5, 7), causal=True, mask=(2, 1, 1), threshold=6554),
    Case((2, 3, 3, 64), causal=True, bias=(1, 3, 1), mask=(2, 1, 3), threshold=6554),
    Case((1, 2, 3, 40), bias=(1, 2, 3), float_bias=False, mask=(1, 1, 3)),
    Case((1, 1, 4, 33), causal=True, bias=(1, 1, 4), float_bias=False, threshold=65536, shift=1),
    Case((1, 2, 4, 2), causal=True),
    Case((1, 1, 2, 64), threshold=30000, shift=3),
    Case((2, 1, 2, 1000), causal=True, threshold=6554, mask=(2, 1, 2)),
    Case((1, 1, 2, 1031), causal=True, threshold=6554),
    *(
        Case((1, 1, 2, 64), mask=(1, 1, 2), bias=(1, 1, 2), threshold=6554, shift=1, shifted=name)
        for name in ("scores", "mask", "bias", "result", "probabilities", "gradient")
    ),
)
LONG_CASES = (
    Case((1, 1, 2, 8200), causal=True, threshold=6554, bias=(1, 1, 1), mask=(1, 1, 2)),
    Case((1, 1, 2, 8203), causal=True, shift=1, threshold=6554),
)


def _operands(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    keys = case.shape[-1]
    mask = bias = None
    if case.mask is not None:
        mask = torch.rand(*case.mask, keys, generator=generator) < 0.4
        mask[-1, -1, -1] = True  # a query that sees nothing
    if case.bias is not None:
        bias = torch.randn(*case.bias, keys, generator=generator).to(torch.float32 if case.float_bias else dtype)
    scores = (3 * torch.randn(case.shape, generator=generator)).to(dtype)
    gradient = torch.randn(case.shape, generator=generator).to(dtype)
    return {"scores": scores, "gradient": gradient, "mask": mask, "bias": bias}


def _strides(operand: torch.Tensor | None, shape: tuple[int, ...]) -> ctypes.Array | None:
    return None if operand is None else (ctypes.c_int64 * 3)(*operand.expand(shape).stride()[:3])


def _check(case: Case, dtype: torch.dtype, build: str, order: str) -> None:
    operands = _operands(case, dtype)
    scores, gradient, mask, bias = (operands[name] for name in ("scores", "gradient", "mask", "bias"))
    dropout = None
    if case.threshold:
        rows = torch.randint(-(2**62), 2**62, case.shape[:3], generator=torch.Generator().manual_seed(1))
        dropout = Dropout(rows, case.threshold, COLUMN_BASE)
    sizes = (ctypes.c_int64 * 4)(*case.shape)
    with emulator.launch("softmax", build, order) as run:
        buffers = {
            name: None if value is None else run.input(value, shift=case.shift_of(name))
            for name, value in (("scores", scores), ("gradient", gradient), ("mask", mask), ("bias", bias))
        }
        row_hashes = columns = probabilities = None
        if dropout is not None:
            row_hashes, columns = run.input(rows), run.output([(case.shape[3] + 1) // 2], torch.int32)
            probabilities = run.output(scores, shift=case.shift_of("probabilities"))
        result, score_gradient = (run.output(scores, shift=case.shift_of(name)) for name in ("result", "gradient"))
        run.call(
            "megatron_softmax_forward",
            *(result, probabilities, buffers["scores"], buffers["mask"], _strides(mask, case.shape), buffers["bias"]),
            *(_strides(bias, case.shape), row_hashes, columns, sizes, SCALE, int(case.causal), dtype),
            *(torch.float32 if bias is None else bias.dtype, case.threshold, COLUMN_BASE, None),
        )
        run.call(
            "megatron_softmax_backward",
            *(score_gradient, buffers["gradient"], probabilities or result, row_hashes, columns, sizes, SCALE),
            *(int(case.causal), dtype, case.threshold, COLUMN_BASE, None),
        )
        found, found_gradient = result.tensor().double(), score_gradient.tensor().double()
    wide = scores.double().requires_grad_()
    expected = scaled_softmax(
        wide, SCALE, causal=case.causal, mask=mask, bias=None if bias is None else bias.double(), dropout=dropout
    )
    (expected_gradient,) = torch.autograd.grad(expected, wide, gradient.double())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected.detach(), atol=tolerance / 4, rtol=tolerance)
    torch.testing.assert_close(found_gradient, expected_gradient, atol=2 * tolerance, rtol=2 * tolerance)
    if case.mask is not None:
        assert not found[-1, -1, -1].any() and not found_gradient[-1, -1, -1].any()


@pytest.mark.parametrize(
    ("build", "order"), [("checked", "forward"), ("checked", "reverse"), ("checked", "random"), ("plain", "random")]
)
def test_every_path(build: str, order: str) -> None:
    for case in CASES:
        for dtype in TOLERANCES:
            _check(case, dtype, build, order)


def test_long_rows() -> None:
    for case in LONG_CASES:
        for dtype in (torch.float32, torch.bfloat16):
            _check(case, dtype, "plain", "random")


@pytest.mark.skipif("fma" not in cpu_features(), reason="the CPU has no fused multiply-add")
@pytest.mark.parametrize("keys", [40, 1031, 8203])
def test_rows_of_huge_scores_sum_to_one(keys: int) -> None:
    scores = torch.randn(1, 1, 4, keys, generator=torch.Generator().manual_seed(keys))
    scores[0, 0, 1] = -scores[0, 0, 1].abs() - 0.5
    bias = torch.randn(1, 1, 4, keys, generator=torch.Generator().manual_seed(1))
    sizes, strides = (ctypes.c_int64 * 4)(1, 1, 4, keys), (ctypes.c_int64 * 3)(0, 0, keys)
    for size, scale, added in itertools.product((1e3, 1e8, 1e10, 1e30), (SCALE, -1.7), (None, bias)):
        with emulator.launch("softmax", "fused") as run:
            result, buffer = run.output(scores), None if added is None else run.input(added)
            run.call(
                "megatron_softmax_forward",
                *(result, None, run.input(scores * size), None, None, buffer, None if added is None else strides),
                *(None, None, sizes, scale, 0, torch.float32, torch.float32, 0, 0, None),
            )
            torch.testing.assert_close(result.tensor().sum(-1), torch.ones(1, 1, 4), msg=f"{size} times {scale}")

"""The softmax of attention: the reference against its definition, and the compiled operation against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout
from megatron.kernels.native.library import Library

INFINITY = float("inf")
SCALE = 0.37
compiled_softmax = partial(scaled_softmax, implementation=Implementation.CSRC)
# Shape, and of mask and bias which dimensions are not broadcast, as bits of (sample, head, query); None for neither.
CASES = [
    ((1, 1, 1, 1), False, None, None),
    ((2, 3, 5, 7), True, (1, 0, 1), None),
    ((2, 2, 4, 129), False, (1, 0, 0), (0, 1, 1)),
    ((1, 2, 9, 4), True, None, (1, 1, 0)),
    ((2, 1, 130, 257), True, (0, 0, 1), (0, 1, 0)),
]


def _dropout(shape: tuple[int, ...], threshold: int = 20000) -> Dropout:
    rows = torch.randint(-(2**62), 2**62, shape[:3], generator=torch.Generator().manual_seed(9))
    return Dropout(rows, threshold, 0x9E3779B97F4A7C15)


def _broadcast(shape: tuple[int, ...], kept: tuple[int, ...] | None) -> list[int] | None:
    if kept is None:
        return None
    return [size if keeps else 1 for size, keeps in zip(shape, (*kept, 1), strict=True)]


def _inputs(case: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict]:
    shape, causal, mask_kept, bias_kept = case
    generator = torch.Generator().manual_seed(4)
    scores, gradient = (3 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)).to(dtype)
    mask_shape, bias_shape = _broadcast(shape, mask_kept), _broadcast(shape, bias_kept)
    options = {"causal": causal, "mask": None, "bias": None, "dropout": _dropout(shape)}
    if mask_shape is not None:
        options["mask"] = torch.rand(mask_shape, generator=generator) < 0.3
        options["mask"][-1, -1, -1] = True
    if bias_shape is not None:
        options["bias"] = torch.randn(bias_shape, generator=generator).to(dtype)
    return scores.requires_grad_(), gradient, options


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_definition(case: tuple) -> None:
    scores, _, options = _inputs(case, torch.float64)
    dropout, options["dropout"] = options["dropout"], None
    weights = (scores * SCALE if options["bias"] is None else scores * SCALE + options["bias"]).exp()
    if options["mask"] is not None:
        weights = weights * ~options["mask"]
    if options["causal"]:
        weights = weights.tril(scores.shape[3] - scores.shape[2])
    total = weights.sum(-1, keepdim=True)
    expected = weights / total.masked_fill(total == 0, 1)
    torch.testing.assert_close(scaled_softmax(scores, SCALE, **options), expected)
    dropped = scaled_softmax(scores, SCALE, **{**options, "dropout": dropout})
    torch.testing.assert_close(dropped, expected * dropout.kept(scores.shape[3]) * dropout.scale)
    assert options["mask"] is None or not dropped[-1, -1, -1].any()


def test_mixed_dtypes_views_and_infinite_biases(compiled: Library) -> None:
    whole = torch.randn(2, 5, 11, 3, generator=torch.Generator().manual_seed(1))
    views = (whole.permute(0, 3, 1, 2), whole.flatten()[1:265].view(2, 3, 4, 11))
    for view in views:
        for dtype in (torch.float32, torch.bfloat16):
            queries, keys = view.shape[2:]
            bias = torch.zeros(1, 1, queries, keys).masked_fill(torch.rand(queries, keys) < 0.5, -INFINITY)
            bias[0, 0, 1] = -INFINITY
            strided = bias.transpose(2, 3).contiguous().transpose(2, 3)
            for own in (bias, strided, bias.to(dtype)):
                found = compiled_softmax(view.to(dtype), 0.5, bias=own, causal=True)
                expected = scaled_softmax(view.to(dtype), 0.5, bias=own, causal=True)
                assert found.dtype == dtype and not found[:, :, 1].any()
                torch.testing.assert_close(found, expected, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled_softmax(views[0].bfloat16(), bias=torch.zeros(1, 1, 1, 11)).dtype == torch.bfloat16
    for shape in ((0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        assert compiled_softmax(torch.zeros(shape)).shape == shape


def test_numbers_that_are_not_finite(compiled: Library) -> None:
    nan = float("nan")
    scores = torch.zeros(1, 1, 5, 40)
    scores[0, 0, 0, 3], scores[0, 0, 1] = nan, nan
    scores[0, 0, 2, 5], scores[0, 0, 3, 7], scores[0, 0, 4, 20:] = INFINITY, -INFINITY, 3e38
    found, expected = compiled_softmax(scores), scaled_softmax(scores)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0, 0, :3].isnan().all() and not found[0, 0, 3:].isnan().any()


def test_torch_knows_the_operation(compiled: Library) -> None:
    scores, gradient, options = _inputs(((2, 2, 3, 5), True, (1, 0, 0), (0, 1, 0)), torch.float64)
    rows = options["dropout"].rows
    with_dropout = (SCALE, True, options["mask"], options["bias"], rows, 20000, -7)
    torch.library.opcheck(torch.ops.megatron.softmax.default, (scores, *with_dropout))
    torch.library.opcheck(torch.ops.megatron.softmax.default, (scores, SCALE, False, None, None, None, 0, 0))
    probabilities = scores.detach().softmax(-1)
    backward = (gradient, probabilities, SCALE, True, rows, 20000, -7)
    torch.library.opcheck(torch.ops.megatron.softmax_backward.default, backward)
    assert torch.autograd.gradcheck(
        lambda x, bias: compiled_softmax(x, SCALE, **{**options, "bias": bias}),
        (scores, options["bias"].requires_grad_()),
    )

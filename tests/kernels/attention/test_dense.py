"""Both forms of attention against the formula in float64, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.kernels import products
from megatron.kernels.attention import dense as attention_file
from megatron.kernels.attention.bounds import local_bias
from megatron.kernels.attention.dense import attention, explicit_attention
from megatron.kernels.choice import TORCH_KERNELS, Implementation, Kernels
from megatron.kernels.native.library import Library

INFINITY = float("inf")


def _heads(
    dtype: torch.dtype = torch.float64, groups: int = 4, keys: int = 7, batch: int = 2, queries: int = 7
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, 4, queries, 4), (batch, groups, keys, 4), (batch, groups, keys, 4))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _bias(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    """Biases of every shape that the network uses, for 2 samples, 4 heads and 7 tokens."""
    visible = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    visible[1, 0, 4:, :4] = False
    per_key = torch.arange(7.0, dtype=torch.float64) * torch.tensor([0.5, 0.25, 0.1, 0.0])[:, None]  # [a, k]
    match name:
        case "documents":
            bias = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~visible, -INFINITY)
        case "sample":
            bias = torch.zeros(1, 1, 7, 7, dtype=torch.float64).masked_fill(~visible[1:], -INFINITY)
        case "alibi":
            bias = per_key[None, :, None]  # [1, a, 1, k]
        case "alibi and documents":
            bias = per_key[None, :, None] + torch.zeros(2, 1, 7, 7).masked_fill(~visible, -INFINITY)
        case "nothing visible":
            visible[0, 0, 2] = False
            bias = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~visible, -INFINITY)
        case _:
            return None
    return bias.to(dtype)


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = torch.einsum("basd,bakd->bask", query, key) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.exp()
    if bias is not None:
        weights = weights * bias.to(scores.dtype).exp()
    if causal:
        weights = weights.tril(key.shape[2] - query.shape[2])
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bask,bakd->basd", weights / total.masked_fill(total == 0, 1), value)


def _with_gradients(operation: partial, heads: list[torch.Tensor]) -> list[torch.Tensor]:
    y = operation(*heads, 0.4)
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, heads, weights)]


CASES = [
    (bias, causal, softcap)
    for softcap in (None, 0.7)
    for bias, causal in (
        ("none", True),
        ("none", False),
        ("documents", False),
        ("sample", False),
        ("alibi", True),
        ("alibi and documents", False),
        ("nothing visible", False),
    )
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("bias", "causal", "softcap"), CASES)
def test_both_forms_equal_the_formula(
    bias: str, causal: bool, softcap: float | None, groups: int, dtype: torch.dtype
) -> None:
    wide = [head.detach().double().requires_grad_() for head in _heads(dtype, groups)]
    options = {"causal": causal, "softcap": softcap}
    expected = _with_gradients(partial(_formula, bias=_bias(bias), **options), wide)
    tolerance = {torch.float64: 1e-7, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    options["bias"] = _bias(bias, torch.float64 if dtype == torch.float64 else torch.float32)
    for form in (attention, explicit_attention):
        found = _with_gradients(partial(form, **options), _heads(dtype, groups))
        for part, reference in zip(found, expected, strict=True):
            assert part.dtype == dtype
            torch.testing.assert_close(part.double(), reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_are_the_last_positions(queries: int, softcap: float | None) -> None:
    for form in (attention, explicit_attention):
        query, key, value = _heads(groups=2)
        whole = form(query, key, value, 0.4, causal=True, softcap=softcap)
        last = form(query[:, :, -queries:], key, value, 0.4, causal=True, softcap=softcap)
        torch.testing.assert_close(last, whole[:, :, -queries:])


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_dropout_drops_and_keeps_the_mean(softcap: float | None) -> None:
    torch.manual_seed(1)
    query, key, value = _heads(batch=200)
    ones = torch.ones_like(value)
    y = attention(query, key, ones, 0.4, dropout=0.25, softcap=softcap)
    y = y.detach()
    assert y.std() > 0.1 and abs(float(y.mean()) - 1) < 0.02


@pytest.mark.parametrize(
    ("dtype", "groups", "keys", "is_training", "dropout", "expected"),
    [
        (torch.bfloat16, 2, 512, True, 0.0, True),
        (torch.bfloat16, 2, 513, True, 0.0, False),
        (torch.bfloat16, 4, 512, True, 0.0, False),
        (torch.bfloat16, 2, 512, False, 0.0, False),
        (torch.bfloat16, 2, 512, True, 0.1, False),
        (torch.float32, 2, 512, True, 0.0, False),
    ],
)
def test_which_attention_is_explicit(
    dtype: torch.dtype,
    groups: int,
    keys: int,
    is_training: bool,
    dropout: float,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "has_bfloat16_products", lambda: True)
    calls = []
    monkeypatch.setattr(attention_file, "explicit_attention", lambda *_, **__: calls.append(1))
    heads = [head.detach().requires_grad_(is_training) for head in _heads(dtype, groups, keys, queries=keys)]
    attention(*heads, 0.4, causal=True, dropout=dropout)
    assert bool(calls) is expected


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The calls of torch's fused attention: dtypes, heads of keys, and True if cuDNN is allowed."""
    calls: list[dict[str, object]] = []

    def record(query, key, value, *, attn_mask, enable_gqa, **_):  # type: ignore[no-untyped-def]
        mask = None if attn_mask is None else attn_mask.dtype
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        calls.append({"query": query.dtype, "mask": mask, "keys": key.shape[1], "gqa": enable_gqa, "cudnn": cudnn})
        return torch.empty_like(query)

    monkeypatch.setattr(attention_file.F, "scaled_dot_product_attention", record)
    return calls


def _elsewhere(dtype: torch.dtype, queries: int, keys: int, groups: int = 4) -> list[torch.Tensor]:
    """Heads on a device that is no CPU; nothing is computed there."""
    shapes = ((1, 4, queries, 8), (1, groups, keys, 8), (1, groups, keys, 8))
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "causal"), [(1, False), (3, True), (7, True)])
def test_biases_have_the_dtype_of_queries_on_a_gpu(
    dtype: torch.dtype, queries: int, causal: bool, fused_calls: list
) -> None:
    query, key, value = _elsewhere(dtype, queries, 7, groups=2)
    slopes = (0.5, 0.25, 0.125, 0.0625)
    assert local_bias(query, 7, None, slopes).dtype == dtype
    wide = torch.zeros(1, 4, queries, 7, device="meta")
    for bias in (local_bias(query, 7, 3, slopes), wide, local_bias(query, 7, 3, ())):
        attention(query, key, value, 0.4, bias=bias, causal=causal)
    expected = {"query": dtype, "mask": dtype, "keys": 4, "gqa": False, "cudnn": True}
    assert fused_calls == [expected] * 3


@pytest.mark.parametrize(
    ("dtype", "keys", "has_bias", "expected"),
    [
        (torch.bfloat16, 64, True, False),
        (torch.float16, 704, True, False),
        (torch.bfloat16, 704, False, True),
        (torch.float32, 704, True, True),
        (torch.bfloat16, 640, True, True),
        (torch.bfloat16, 703, True, True),
    ],
)
def test_cudnn_is_not_given_masks_that_it_cannot_differentiate(
    dtype: torch.dtype, keys: int, has_bias: bool, expected: bool, fused_calls: list
) -> None:
    heads = _elsewhere(dtype, keys, keys)
    bias = torch.zeros(1, 1, keys, keys, dtype=dtype, device="meta") if has_bias else None
    attention(*heads, 0.4, bias=bias, causal=not has_bias)
    assert [call["cudnn"] for call in fused_calls] == [expected]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def _errors(heads: list[torch.Tensor], bias: torch.Tensor, exact_bias: torch.Tensor, scale: float) -> list[float]:
    """Largest errors of the result and of the gradients, in parts of the largest entry; float64 is the reference."""
    exact_heads = [head.detach().double().requires_grad_() for head in heads]
    y = attention(*heads, scale, bias=bias)
    exact = explicit_attention(*exact_heads, scale, bias=exact_bias)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    found = [y, *torch.autograd.grad(y, heads, weights)]
    expected = [exact, *torch.autograd.grad(exact, exact_heads, weights.double())]
    with torch.no_grad():
        return [
            ((part - known).abs().max() / known.abs().max()).item() for part, known in zip(found, expected, strict=True)
        ]


# Eight roundings: of the probabilities, of their gradients, of each result; float32 sums of 4,096 terms.
BOUNDS_ON_A_GPU = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2e-5}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS_ON_A_GPU)
@pytest.mark.parametrize("length", [200, 4096])
def test_linear_biases_on_a_gpu(length: int, dtype: torch.dtype) -> None:
    """The bound is that of attention without a bias: eight roundings of the dtype.

    A rounded bias `-x` is wrong by x/512 in bfloat16, at 4,096 tokens by up to 4, but its key has a weight of exp(-x).
    """
    bound, generator = BOUNDS_ON_A_GPU[dtype], torch.Generator().manual_seed(2)
    slopes = (0.5, 2**-2.5, 2**-5.5, 2**-8)
    shapes = ((1, 4, length, 64), (1, 2, length, 64), (1, 2, length, 64))
    heads = [torch.randn(shape, generator=generator).to(dtype).cuda().requires_grad_() for shape in shapes]
    exact_bias = local_bias(heads[0].double(), length, None, slopes)
    for bias in (local_bias(heads[0], length, None, slopes), exact_bias.float()):
        errors = _errors(heads, bias, exact_bias, 0.125)
        assert all(error <= bound for error in errors), errors
    last = [heads[0][:, :, -1:], *heads[1:]]
    found = attention(*last, 0.125, bias=local_bias(last[0], length, None, slopes))
    expected = explicit_attention(*(head.double() for head in last), 0.125, bias=exact_bias[:, :, -1:])
    assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [64, 640, 704])
def test_gradients_of_queries_with_low_scores_on_a_gpu(length: int, dtype: torch.dtype) -> None:
    """All scores are near -120, so each log-sum-exp is below -88.7: https://github.com/pytorch/pytorch/issues/196678."""
    generator = torch.Generator().manual_seed(3)
    heads = [torch.randn(1, 2, length, 64, generator=generator) * size for size in (0.1, 1.0, 1.0)]
    heads[0][..., 0] = -8.0  # each score is -8 * 120 * 0.125 and some more
    heads[1] = torch.cat((torch.full_like(heads[1][..., :1], 120.0), heads[1][..., 1:]), dim=-1)
    heads = [head.to(dtype).cuda().requires_grad_() for head in heads]
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
    exact_bias = torch.zeros(1, 1, length, length, dtype=torch.float64, device="cuda").masked_fill(hidden, -INFINITY)
    # A query's gradient is a weighted sum of keys whose weights add up to 0, so rounded weights leave some of the 120.
    errors, bound = _errors(heads, exact_bias.to(dtype), exact_bias, 0.125), BOUNDS_ON_A_GPU[dtype]
    assert all(error <= limit for error, limit in zip(errors, (bound, 120 * bound, bound, bound), strict=True)), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("softcap", "causal"), [(None, True), (0.7, False)])
def test_attention_with_the_compiled_softmax(
    compiled: Library, dtype: torch.dtype, softcap: float | None, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    heads = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    bias = torch.randn(2, 1, 5, 7, generator=generator).masked_fill(torch.rand(2, 1, 5, 7) < 0.3, float("-inf"))
    bias[1, 0, 2] = float("-inf")
    options = {"bias": bias, "causal": causal, "softcap": softcap}
    results = []
    for kernels, wide in ((Kernels(softmax=Implementation.CSRC), False), (TORCH_KERNELS, False), (TORCH_KERNELS, True)):
        own = [head.detach().double().requires_grad_() for head in heads] if wide else heads
        y = explicit_attention(*own, 0.4, kernels=kernels, **options)
        gradient = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        results.append([y.detach(), *torch.autograd.grad(y, own, gradient)])
    for found, expected, exact in zip(*results, strict=True):
        own_error = (expected - exact).abs().max()
        assert found.dtype == dtype
        assert (found - exact).abs().max() <= 1.5 * own_error + torch.finfo(dtype).eps * exact.abs().max()
    assert not results[0][0][1, :, 2].any()
    halved = explicit_attention(*heads, 0.4, lambda x: x / 2, kernels=Kernels(softmax=Implementation.CSRC), **options)
    torch.testing.assert_close(2 * halved, results[0][0])

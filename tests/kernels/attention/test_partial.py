"""Results for blocks of keys, merged, are attention to all keys, and so are the gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.kernels.attention.partial import PartialAttention, merge_

FORMS = {
    "fused": (PartialAttention(0.25), torch.float32, "cpu"),
    "explicit": (PartialAttention(0.25, explicit=True), torch.float32, "cpu"),
    "soft-cap": (PartialAttention(0.25, softcap=1.5), torch.float32, "cpu"),
    "bf16": (PartialAttention(0.25), torch.bfloat16, "cpu"),
    "cuda": (PartialAttention(0.25), torch.bfloat16, "cuda"),
}


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=pytest.mark.gpu) if name == "cuda" else name for name in FORMS]
)
@pytest.mark.parametrize("groups", [1, 4])
def test_two_blocks_of_keys_are_all_keys(form: str, groups: int) -> None:
    attention, dtype, device = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    heads = (4, groups, groups, 4)
    query, key, value, gradient = (
        torch.randn(2, count, 24, 16, generator=generator).to(device, dtype) for count in heads
    )
    wide = [part.double().requires_grad_() for part in (query, key, value)]
    keys, values = (part.repeat_interleave(4 // groups, dim=1) for part in wide[1:])
    scores = 0.25 * wide[0] @ keys.transpose(2, 3)
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    # the first 10 keys are hidden from no query; of the others, keys 10.. with queries 10.. are causal
    hidden = torch.zeros(24, 24, dtype=torch.bool, device=device)
    hidden[:10, 10:] = True
    hidden[10:, 10:] = torch.ones(14, 14, dtype=torch.bool, device=device).triu(1)
    whole = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    whole.backward(gradient.double())

    early, late = slice(0, 10), slice(10, 24)
    first = attention.forward(query, key[:, :, early], value[:, :, early])
    out, logsumexp = first[0].float(), first[1].clone()
    part = attention.forward(query[:, :, late], key[:, :, late], value[:, :, late], causal=True)
    merge_(out[:, :, late], logsumexp[:, :, late], *part)
    limit = 1e-6 if dtype == torch.float32 else 1.6e-2
    assert (out - whole).abs().max() < limit * whole.abs().max()

    result = out.to(dtype)
    of_early = attention.backward(gradient, query, key[:, :, early], value[:, :, early], result, logsumexp)
    of_late = attention.backward(
        *(part[:, :, late] for part in (gradient, query, key, value, result, logsumexp)), causal=True
    )
    of_queries = of_early[0].float()
    of_queries[:, :, late] += of_late[0]
    found = [of_queries, *(torch.cat(pair, dim=2) for pair in zip(of_early[1:], of_late[1:], strict=True))]
    for of_part, true in zip(found, wide, strict=True):
        assert true.grad is not None
        assert (of_part - true.grad).abs().max() < limit * true.grad.abs().max()


def test_queries_that_see_nothing_of_a_block_leave_the_result_alone() -> None:
    states = [torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    query, key, value, gradient = states
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :] = -torch.inf
    for attention in (PartialAttention(0.3), PartialAttention(0.3, explicit=True)):
        out, logsumexp = attention.forward(query, key, value, bias=bias)
        assert (logsumexp[:, :, 2] == -torch.inf).all() and (out[:, :, 2] == 0).all()
        before = (torch.ones(1, 2, 6, 8), torch.zeros(1, 2, 6))
        merged, _ = merge_(before[0].clone(), before[1].clone(), out, logsumexp)
        assert torch.equal(merged[:, :, 2], before[0][:, :, 2]) and not torch.equal(merged[:, :, 1], before[0][:, :, 1])
        total = torch.logaddexp(logsumexp, before[1])
        of_queries = attention.backward(gradient, query, key, value, merged, total, bias=bias)[0]
        assert torch.isfinite(of_queries).all() and (of_queries[:, :, 2] == 0).all()


@pytest.mark.parametrize(
    ("attention", "dtype", "size", "cuda", "holds"),
    [
        (PartialAttention(1.0), torch.float32, 12, False, False),
        (PartialAttention(1.0, softcap=5.0), torch.bfloat16, 64, False, True),
        (PartialAttention(1.0, explicit=True), torch.bfloat16, 64, True, True),
        (PartialAttention(1.0), torch.bfloat16, 64, True, False),
        (PartialAttention(1.0), torch.float32, 64, True, True),
        (PartialAttention(1.0), torch.bfloat16, 12, True, True),
        (PartialAttention(1.0), torch.float16, 264, True, True),
    ],
)
def test_scores_are_held_where_no_fused_kernel_runs(
    attention: PartialAttention, dtype: torch.dtype, size: int, cuda: bool, holds: bool
) -> None:
    query = SimpleNamespace(dtype=dtype, is_cuda=cuda, shape=(1, 2, 8, size))
    assert attention.holds_scores(query) == holds  # type: ignore[arg-type]

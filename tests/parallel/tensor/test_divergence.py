"""The split divergence equals torch's in float64, forward and gradient, on one rank and on two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.tensor.divergence import vocab_parallel_divergences
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

# vocabulary, rows with padding, scale of the logits, temperature; the third leaves the second of two ranks nothing
CASES = [(10, 16, 1.0, 1.0), (16, 16, 3.0, 2.5), (3, 16, 1.0, 0.5), (9, 10, 1e4, 1.0)]


def _inputs(vocabulary: int, padded: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    pair = torch.randn(2, 2, 5, padded, generator=generator) * scale
    pair[1, 0, 0] = pair[0, 0, 0]  # a token on which both agree
    return pair[0], pair[1], torch.rand(2, 5, generator=generator)


def _reference(vocabulary: int, padded: int, scale: float, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, target, weights = _inputs(vocabulary, padded, scale)
    logits = logits.double().requires_grad_()
    own = F.log_softmax(logits[..., :vocabulary] / temperature, dim=-1)
    wanted = F.log_softmax(target.double()[..., :vocabulary] / temperature, dim=-1)
    divergences = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
    (divergences * weights).sum().backward()
    assert logits.grad is not None
    return divergences.detach(), logits.grad


def _ours(
    axis: Axis, vocabulary: int, padded: int, scale: float, temperature: float, block_values: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    width = padded // axis.size
    logits, target, weights = _inputs(vocabulary, padded, scale)
    columns = slice(axis.rank * width, (axis.rank + 1) * width)
    own = logits[..., columns].clone().requires_grad_()
    teacher = target[..., columns].clone().requires_grad_()
    divergences = vocab_parallel_divergences(
        own, teacher, axis, vocabulary, temperature=temperature, block_values=block_values
    )
    (divergences * weights).sum().backward()
    assert teacher.grad is None and own.grad is not None
    return divergences.detach(), own.grad


def _on_rank(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    axis = open_mesh(Layout(2)).tp
    return [_ours(axis, *case) for case in CASES]


def _check(found: torch.Tensor, gradient: torch.Tensor, case: tuple[int, int, float, float]) -> None:
    expected, expected_gradient = _reference(*case)
    assert found.dtype == torch.float32 and found.min() >= 0 and found[0, 0] == 0
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)
    assert not gradient[..., case[0] :].any()


def test_split_over_two_ranks() -> None:
    (first, second) = run_ranks(_on_rank, 2)
    for case, (found, left), (other, right) in zip(CASES, first, second, strict=True):
        assert torch.equal(found, other)
        _check(found, torch.cat([left, right], dim=-1), case)


@pytest.mark.parametrize("block_values", [None, 1, 33])
def test_blocks_of_any_size(block_values: int | None) -> None:
    for case in CASES:
        _check(*_ours(ParallelMesh.single().tp, *case, block_values=block_values), case)


def test_networks_that_almost_agree_have_a_divergence_of_the_right_size() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 4, 1000, generator=generator)
    near = logits + 1e-3 * torch.randn(1, 4, 1000, generator=generator)
    wanted, own = (F.log_softmax(part.double(), dim=-1) for part in (near, logits))
    expected = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)  # about 5e-7
    found = vocab_parallel_divergences(logits, near, ParallelMesh.single().tp, 1000)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=0)
    half = logits.bfloat16().requires_grad_()
    vocab_parallel_divergences(half, near.bfloat16(), ParallelMesh.single().tp, 1000).sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16

"""The split losses equal torch's, forward and gradient, padding and label position notwithstanding."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_losses
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

CASES = [(10, 16, 1.0), (16, 16, 1.0), (3, 16, 1.0), (10, 16, 100.0), (9, 10, 1e4)]


def _inputs(vocabulary: int, padded: int, scale: float, dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, 5, padded, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 5), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocabulary - 1
    return logits, labels, torch.rand(2, 5, generator=generator)


SMOOTHING, COEFFICIENT = 0.1, 1e-2
# Which terms are minimized; every combination takes its own way through backward.
TERMS = ["cross_entropy", "smoothed", "z_loss", "all"]


def _reference(vocabulary: int, padded: int, scale: float, terms: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels, weights = _inputs(vocabulary, padded, scale)
    logits = logits.double().requires_grad_()
    true = logits[..., :vocabulary]
    smoothing = SMOOTHING if terms in ("smoothed", "all") else 0.0
    loss = F.cross_entropy(true.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing).view(2, 5)
    z_loss = COEFFICIENT * true.logsumexp(-1).square()
    loss = {"z_loss": z_loss, "all": loss + z_loss}.get(terms, loss)
    (loss * weights).sum().backward()
    return loss.detach().float(), logits.grad.float()


def _ours(
    axis: Axis, vocabulary: int, padded: int, scale: float, terms: str, block_values: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels, weights = _inputs(vocabulary, padded, scale)
    width = padded // axis.size
    own = logits[..., axis.rank * width : (axis.rank + 1) * width].clone().requires_grad_()
    before = own.detach().clone()
    is_smoothed = terms in ("smoothed", "all")
    losses = vocab_parallel_losses(own, labels, axis, vocabulary, with_uniform=is_smoothed, block_values=block_values)
    loss, z_loss = losses.cross_entropy, COEFFICIENT * losses.log_normalizer.square()
    if is_smoothed:
        assert losses.uniform is not None
        loss = (1 - SMOOTHING) * loss + SMOOTHING * losses.uniform
    loss = {"z_loss": z_loss, "all": loss + z_loss}.get(terms, loss)
    (loss * weights).sum().backward()
    assert torch.equal(own.detach(), before)
    assert loss.dtype == torch.float32
    return loss.detach(), own.grad


def _on_rank(rank: int) -> list:
    axis = open_mesh(Layout(2)).tp
    return [_ours(axis, *case, terms) for case, terms in itertools.product(CASES, TERMS)]


def _check(loss: torch.Tensor, gradient: torch.Tensor, case: tuple[int, int, float], terms: str) -> None:
    expected, expected_gradient = _reference(*case, terms)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    # the gradient of the z-loss grows with log Z
    scale = max(1.0, expected_gradient.abs().max().item())
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6 * scale)
    assert not gradient[..., case[0] :].any()


def test_split_over_two_ranks() -> None:
    parts = run_ranks(_on_rank, 2)
    for (case, terms), first, second in zip(itertools.product(CASES, TERMS), *parts, strict=True):
        assert torch.equal(first[0], second[0])
        _check(first[0], torch.cat([first[1], second[1]], dim=-1), case, terms)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("block_values", [1, 20, 1 << 18])
def test_whole_in_blocks(block_values: int, terms: str) -> None:
    for case in CASES:
        _check(*_ours(Axis.single("tp"), *case, terms, block_values=block_values), case, terms)


def test_bfloat16_logits_give_a_float32_loss() -> None:
    logits, labels, _ = _inputs(10, 16, 1.0, torch.bfloat16)
    logits.requires_grad_()
    loss = vocab_parallel_losses(logits, labels, Axis.single("tp"), 10).cross_entropy
    loss.sum().backward()
    expected = F.cross_entropy(logits.detach()[..., :10].float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss.detach().flatten(), expected)
    assert logits.grad.dtype == torch.bfloat16


class _LargestFloat32(TorchDispatchMode):
    """Notes the largest float32 tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.numel = max(self.numel, result.numel())
        return result


def test_the_blocks_bound_what_is_held_in_float32() -> None:
    logits = torch.randn(1, 64, 1000).bfloat16().requires_grad_()
    with _LargestFloat32() as noted:
        labels = torch.zeros(1, 64, dtype=torch.int64)
        losses = vocab_parallel_losses(logits, labels, Axis.single("tp"), 1000, with_uniform=True, block_values=4000)
        sum(loss.sum() for loss in losses).backward()
    assert noted.numel == 4000


def test_nan_logits_give_a_nan_loss() -> None:
    logits, labels, _ = _inputs(10, 16, 1.0)
    logits[0, 0, 0] = float("nan")
    loss = vocab_parallel_losses(logits, labels, Axis.single("tp"), 10).cross_entropy
    assert loss[0, 0].isnan() and not loss[0, 1:].isnan().any()


VOCABULARIES = (16, 11, 8, 5, 1)  # of 16 columns; from 8 on down the second rank holds padding only


def _logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with ties within a rank, across ranks and with the padding, and rows without."""
    drawn = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    drawn[:20] = drawn[:20].round()
    drawn[20:30, 11:] += 100
    return drawn.to(dtype)


def _expected(vocab_size: int, dtype: torch.dtype) -> list[int]:
    rows = _logits(dtype)[:, :vocab_size].tolist()
    return [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_smallest_id_of_the_largest_logits(vocab_size: int, dtype: torch.dtype) -> None:
    found = vocab_parallel_argmax(_logits(dtype), Axis.single("tp"), vocab_size)
    assert found.tolist() == _expected(vocab_size, dtype)


def _argmax_on_rank(rank: int) -> list[list[int]]:
    axis, columns = open_mesh(Layout(2)).tp, 8
    own = _logits()[:, rank * columns : (rank + 1) * columns]
    return [vocab_parallel_argmax(own.view(4, 10, 8), axis, size).flatten().tolist() for size in VOCABULARIES]


def test_ranks_agree_on_the_token_of_the_whole_row() -> None:
    expected = [_expected(size, torch.float32) for size in VOCABULARIES]
    assert run_ranks(_argmax_on_rank, 2) == [expected, expected]

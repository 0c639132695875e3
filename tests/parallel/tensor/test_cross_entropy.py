"""The split loss equals torch's, forward and gradient, padding and label position notwithstanding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

CASES = [(10, 16, 1.0), (16, 16, 1.0), (3, 16, 1.0), (10, 16, 100.0), (9, 10, 1e4)]


def _inputs(vocabulary: int, padded: int, scale: float, dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, 5, padded, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 5), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocabulary - 1
    return logits, labels, torch.rand(2, 5, generator=generator)


def _reference(vocabulary: int, padded: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels, weights = _inputs(vocabulary, padded, scale)
    logits.requires_grad_()
    loss = F.cross_entropy(logits[..., :vocabulary].double().flatten(0, 1), labels.flatten(), reduction="none").view(
        2, 5
    )
    (loss * weights).sum().backward()
    return loss.detach().float(), logits.grad


def _ours(
    axis: Axis, vocabulary: int, padded: int, scale: float, block_values: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels, weights = _inputs(vocabulary, padded, scale)
    width = padded // axis.size
    own = logits[..., axis.rank * width : (axis.rank + 1) * width].clone().requires_grad_()
    before = own.detach().clone()
    loss = vocab_parallel_cross_entropy(own, labels, axis, vocabulary, block_values=block_values)
    (loss * weights).sum().backward()
    assert torch.equal(own.detach(), before)
    assert loss.dtype == torch.float32
    return loss.detach(), own.grad


def _on_rank(rank: int) -> list:
    axis = open_mesh(Layout(2)).tp
    return [_ours(axis, *case) for case in CASES]


def test_split_over_two_ranks() -> None:
    parts = run_ranks(_on_rank, 2)
    for index, case in enumerate(CASES):
        loss, gradient = _reference(*case)
        for part in parts:
            torch.testing.assert_close(part[index][0], loss, rtol=1e-5, atol=1e-6)
        assert torch.equal(parts[0][index][0], parts[1][index][0])
        joined = torch.cat([parts[0][index][1], parts[1][index][1]], dim=-1)
        torch.testing.assert_close(joined, gradient, rtol=1e-4, atol=1e-6)
        assert not joined[..., case[0] :].any()


@pytest.mark.parametrize("block_values", [1, 20, 1 << 18])
def test_whole_in_blocks(block_values: int) -> None:
    for case in CASES:
        loss, gradient = _ours(Axis.single("tp"), *case, block_values=block_values)
        expected, expected_gradient = _reference(*case)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_bfloat16_logits_give_a_float32_loss() -> None:
    logits, labels, _ = _inputs(10, 16, 1.0, torch.bfloat16)
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, labels, Axis.single("tp"), 10)
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
        loss = vocab_parallel_cross_entropy(
            logits, torch.zeros(1, 64, dtype=torch.int64), Axis.single("tp"), 1000, block_values=4000
        )
        loss.sum().backward()
    assert noted.numel == 4000


def test_nan_logits_give_a_nan_loss() -> None:
    logits, labels, _ = _inputs(10, 16, 1.0)
    logits[0, 0, 0] = float("nan")
    loss = vocab_parallel_cross_entropy(logits, labels, Axis.single("tp"), 10)
    assert loss[0, 0].isnan() and not loss[0, 1:].isnan().any()

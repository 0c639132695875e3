"""Statistics and gradients of rows of logits: the reference and the compiled operations against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, logit_gradient
from megatron.kernels.native.library import Library
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import vocab_parallel_losses
from megatron.parallel.tensor.head_loss import FactoredLogits, LossTerms, head_losses

CSRC, TORCH = Implementation.CSRC, Implementation.TORCH


def _case(dtype: torch.dtype, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, LossGradients]:
    generator = torch.Generator().manual_seed(columns)
    logits = (5 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(-1, columns + 1, (rows,), generator=generator)
    return logits, labels, LossGradients(*torch.rand(3, rows, generator=generator))


@pytest.mark.parametrize("implementation", [TORCH, CSRC])
def test_the_gradient_is_the_derivative_of_the_losses(compiled: Library, implementation: Implementation) -> None:
    logits, labels, gradients = _case(torch.float64, 3, 7)
    own = logits.requires_grad_()
    rows = 2 * torch.tanh(own[:, :6] / 2)
    chosen = rows.gather(1, labels.clamp(0, 5).unsqueeze(1)).squeeze(1) * ((labels >= 0) & (labels < 6))
    normalizer = rows.logsumexp(1)
    sums = (normalizer - chosen, normalizer, normalizer - rows.sum(1) / 9)
    sum((loss * weight).sum() for loss, weight in zip(sums, gradients, strict=True)).backward()
    found = logit_gradient(
        logits.detach(), labels, normalizer.detach(), gradients, 6, 9, softcap=2.0, implementation=implementation
    )
    torch.testing.assert_close(found, own.grad, rtol=1e-6, atol=1e-8)


def test_torch_knows_the_operations(compiled: Library) -> None:
    logits, labels, gradients = _case(torch.float32, 3, 7)
    operations = torch.ops.megatron
    torch.library.opcheck(operations.logit_statistics.default, (logits, labels, 6, 0.0))
    settings = (labels, logits.logsumexp(1), gradients.of_label, None, gradients.of_uniform, 6, 9, 2.0)
    torch.library.opcheck(operations.logit_gradient.default, (logits, *settings))
    torch.library.opcheck(operations.logit_gradient_.default, (logits, *settings))
    torch.library.opcheck(operations.logit_losses_.default, (logits, labels, gradients.of_label, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("terms", "softcap"), [(LossTerms(0.1, 0.01), 4.0), (LossTerms(), None)])
def test_losses_and_gradients_of_the_head(
    compiled: Library, terms: LossTerms, softcap: float | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens, weight = torch.randn(2, 9, 8, generator=generator), torch.randn(32, 8, generator=generator)
    labels, weights = torch.randint(0, 21, (2, 9), generator=generator), torch.rand(2, 9, generator=generator)
    axis, found = Axis.single("tp"), []
    for chosen in (TORCH, CSRC):
        hidden, table = (part.to(dtype, copy=True).requires_grad_() for part in (tokens, weight))
        factors = FactoredLogits(hidden, table, softcap)
        losses, gradients = head_losses(factors, labels, weights, axis, 21, terms, chunk_rows=5, implementation=chosen)
        logits = F.linear(tokens, weight).requires_grad_()
        whole = vocab_parallel_losses(logits, labels, axis, 21, with_uniform=True, implementation=chosen)
        (torch.stack(whole) * torch.tensor([1.0, 0.1, 0.2])[:, None, None]).sum().backward()
        assert gradients is not None
        found.append(
            [*losses, gradients.of_hidden, gradients.of_weight, *(part.detach() for part in whole), logits.grad]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("derivative", [0.0, 3.0])
def test_gradients_of_the_head_survive_a_factor_of_zero(derivative: float) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens, weight = torch.randn(2, 9, 8, generator=generator), torch.randn(32, 8, generator=generator)
    labels, weights = torch.randint(0, 21, (2, 9), generator=generator), torch.rand(2, 9, generator=generator)
    found = []
    for factor in (None, torch.tensor(0.0), torch.tensor(0.5)):
        hidden, table = (part.clone().requires_grad_() for part in (tokens, weight))
        arguments = (FactoredLogits(hidden, table), labels, weights, Axis.single("tp"), 21, LossTerms())
        losses, gradients = head_losses(*arguments, factor=factor)
        assert gradients is not None
        total = gradients.attached_to((losses[0][0] * weights).sum())
        found.append(torch.autograd.grad(total * derivative, (hidden, table)))
    for others in found[1:]:
        for expected, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, expected)

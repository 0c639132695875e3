"""The CUDA source of cross-entropy, run on a CPU: statistics and gradients, tails, alignments and every line."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.cross_entropy import LossGradients, logit_gradient, logit_statistics

VOCABULARY = 5000


def _check(run: emulator.Run, dtype: torch.dtype, rows: int, columns: int, valid: int, softcap: float | None) -> None:
    """Statistics, the gradient of all losses in place, and that of the label in rows of another alignment."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(-1, columns + 1, (rows,), generator=generator)
    gradients = LossGradients(*torch.rand(3, rows, generator=generator))
    exact = logit_statistics(logits.double(), labels, valid, softcap=softcap, with_logit_sum=True)
    normalizer = (exact.total.log() + exact.largest).float() if valid else torch.zeros(rows)
    cap = softcap or 0.0

    given, own_labels, found = run.input(logits, 1), run.input(labels), run.output((4, rows))
    run.call("megatron_logit_statistics", found, given, own_labels, rows, columns, valid, dtype, cap, None)
    for values, expected in zip(found.tensor(), exact, strict=True):
        expected = expected.clamp(min=torch.finfo(torch.float32).min)  # the largest of no logits
        torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=2e-4)

    written, apart = run.inout(logits, 1), run.output(logits, shift=2)
    derivatives = [run.input(part) for part in (normalizer, *gradients)]
    sizes = (rows, columns, columns, columns, valid, VOCABULARY, dtype, cap, None)
    run.call("megatron_logit_gradient", written, written, own_labels, *derivatives, *sizes)
    run.call("megatron_logit_gradient", apart, given, own_labels, *derivatives[:2], None, None, *sizes)
    for result, minimized in ((written, gradients), (apart, LossGradients(gradients.of_label))):
        true = logit_gradient(
            logits.double(), labels, normalizer.double(), minimized, valid, VOCABULARY, softcap=softcap
        )
        error = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(result.tensor().double(), true, rtol=error, atol=2e-6)
        assert not result.tensor()[:, valid:].any()


@pytest.mark.parametrize("order", list(emulator.ORDERS))
@pytest.mark.parametrize("dtype", list(emulator.DTYPE_CODES))
def test_values_where_every_access_is_checked(dtype: torch.dtype, order: str) -> None:
    for rows, columns, valid, softcap in [(1, 1, 1, None), (11, 24, 19, 3.0), (2, 16, 0, None), (2, 1037, 1030, 3.0)]:
        with emulator.launch("cross_entropy", order=order) as run:
            _check(run, dtype, rows, columns, valid, softcap)


def test_large_inputs() -> None:
    with emulator.launch("cross_entropy", "plain") as run:
        for dtype in emulator.DTYPE_CODES:
            _check(run, dtype, 19, 300, 290, 3.0)  # a warp to a row
            _check(run, dtype, 5, 20011, 20000, None if dtype is torch.float32 else 3.0)


def _check_losses(run: emulator.Run, dtype: torch.dtype, rows: int, columns: int, valid: int, stride: int) -> None:
    """Losses and gradients of one pass; what lies between the rows is left as it was."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, stride, generator=generator)).to(dtype)
    labels = torch.randint(0, valid, (rows,), generator=generator)
    labels[0], labels[-1] = valid - 1, -1
    weights = torch.rand(rows, generator=generator)
    written, losses = run.inout(logits), run.output((2, rows))
    sizes = (rows, columns, stride, valid, dtype, None)
    run.call("megatron_logit_losses", losses, written, run.input(labels), run.input(weights), *sizes)
    wide = logits[:, :valid].double()
    normalizer = wide.logsumexp(1)
    one_hot = torch.zeros_like(wide)
    one_hot[:-1].scatter_(1, labels[:-1, None], 1.0)
    expected = torch.stack((normalizer - (wide * one_hot).sum(1), normalizer))
    torch.testing.assert_close(losses.tensor().double(), expected, rtol=1e-6, atol=2e-6)
    gradient = ((wide - normalizer[:, None]).exp() - one_hot) * weights[:, None].double()
    found = written.tensor()
    torch.testing.assert_close(found[:, :valid].double(), gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert not found[:, valid:columns].any() and torch.equal(found[:, columns:], logits[:, columns:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_gradients_in_one_pass(dtype: torch.dtype) -> None:
    with emulator.launch("cross_entropy", order="random") as run:
        for rows, columns, valid, stride in [(2, 8, 1, 8), (3, 40, 37, 48), (2, 8256, 8250, 8256)]:
            _check_losses(run, dtype, rows, columns, valid, stride)
    with emulator.launch("cross_entropy", "plain") as run:
        _check_losses(run, dtype, 3, 264, 257, 272)
        _check_losses(run, dtype, 2, 50304, 50257, 50304)
        _check_losses(run, dtype, 2, 57344, 57344, 57344)

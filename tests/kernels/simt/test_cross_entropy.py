"""The CUDA source of cross-entropy, run on a CPU: statistics and gradients, tails, alignments and every line."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.cross_entropy import LossGradients, logit_gradient, logit_statistics
from tests.kernels.simt import emulator

VOCABULARY = 5000


def _check(run: emulator.Run, dtype: torch.dtype, rows: int, columns: int, valid: int, softcap: float | None) -> None:
    """Statistics, the gradient of all losses in place, and that of the label in rows of another alignment."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(-1, columns + 1, (rows,), generator=generator)
    gradients = LossGradients(*torch.rand(3, rows, generator=generator))
    exact = logit_statistics(logits.double(), labels, valid, softcap=softcap, with_whole=True)
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


def test_every_line_has_run(whole_file: None) -> None:
    assert emulator.unexecuted_lines("cross_entropy") == []

"""The CUDA kernels over lists of tensors, run on a CPU by the emulator, compared with float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from csrc.emulator import emulator
from csrc.emulator.emulator import Buffer, Run

CHUNK = 1 << 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# elements, dtype, shift behind a boundary
SMALL = [(0, 0, 0), (1, 0, 0), (37, 0, 1), (64, 1, 0), (0, 2, 0), (67, 2, 0), (130, 1, 3), (35, 0, 0)]
LARGE = [(CHUNK + 5, 0, 0), (3, 1, 0), (2 * CHUNK, 2, 0), (CHUNK - 1, 1, 1)]


def table_of(run: Run, kinds: Sequence[Sequence[Buffer]]) -> tuple[Buffer, int, int]:
    """The table that launchers go by, the number of tensors, and that of chunks."""
    counts = [buffer.elements for buffer in kinds[0]]
    firsts = [sum(-(-count // CHUNK) for count in counts[:number]) for number in range(len(counts) + 1)]
    codes = [
        sum(emulator.DTYPE_CODES[buffer.dtype] << (8 * kind) for kind, buffer in enumerate(buffers))
        for buffers in zip(*kinds, strict=True)
    ]
    for kind, buffers in enumerate(kinds):
        for number, buffer in enumerate(buffers):
            buffer.describe(f"tensor {number} of kind {kind}")
    addresses = [buffer.address for buffers in kinds for buffer in buffers]
    return run.input(torch.tensor([*addresses, *counts, *firsts, *codes])), len(counts), firsts[-1]


def _values(cases: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, generator=generator).to(DTYPES[dtype]) for count, dtype, _ in cases]


@pytest.mark.parametrize(("build", "order"), [("checked", "random"), ("plain", "reverse")])
def test_norms_and_sums(build: str, order: str) -> None:
    cases = SMALL if build == "checked" else LARGE
    values = _values(cases)
    before = [torch.linspace(-1, 1, value.numel()) for value in values]
    with emulator.launch("multi_tensor", build, order) as run:
        sources = [run.input(value, shift=case[2]) for value, case in zip(values, cases, strict=True)]
        table, tensors, chunks = table_of(run, [sources])
        norm, norms, sums = run.output([1]), run.output([tensors]), run.output([chunks], torch.float64)
        run.call("megatron_multi_tensor_norm", norm, norms, sums, table, tensors, chunks, None)
        alone, sums_again = run.output([1]), run.output([chunks], torch.float64)
        run.call("megatron_multi_tensor_norm", alone, None, sums_again, table, tensors, chunks, None)
        totals = [run.inout(value, shift=number % 3) for number, value in enumerate(before)]
        pairs, *_ = table_of(run, [totals, sources])
        run.call("megatron_multi_tensor_add", pairs, tensors, chunks, None)
    exact = torch.stack([value.double().norm() for value in values])
    torch.testing.assert_close(norms.tensor().double(), exact, rtol=3e-7, atol=0)
    torch.testing.assert_close(norm.tensor().double()[0], exact.norm(), rtol=3e-7, atol=0)
    assert torch.equal(alone.tensor(), norm.tensor())
    for total, value, addend in zip(totals, before, values, strict=True):
        assert torch.equal(total.tensor(), value + addend.float())

"""The emulator computes what a GPU would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from csrc.emulator import emulator

SOURCE = Path(__file__).resolve().parents[3] / "csrc/emulator/planted/planted.cu"
THREADS = 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_conversions_are_those_of_torch(dtype: torch.dtype) -> None:
    """Every 16-bit pattern, and floats around all of them: halfway, next to halfway, too large and too small."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    finite = patterns.view(dtype).float()
    finite = finite[finite.isfinite()]
    between = (finite[1:] + finite[:-1]) / 2
    floats = torch.cat([finite, between, between.nextafter(finite[1:]), between.nextafter(finite[:-1]), finite * 1e-7])
    floats = torch.cat([floats, torch.tensor([65519.99, 65520.0, 3.4e38, -3.4e38, 1e-45, torch.inf, -torch.inf])])
    with emulator.launch(SOURCE, "plain") as run:
        wide, narrow = run.output(patterns, torch.float32), run.output(floats, dtype)
        run.call("megatron_convert", wide, run.input(patterns), len(patterns), dtype, False, None)
        run.call("megatron_convert", narrow, run.input(floats), len(floats), dtype, True, None)
    torch.testing.assert_close(wide.tensor(), patterns.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(narrow.tensor().view(torch.int16), floats.to(dtype).view(torch.int16))


@pytest.mark.parametrize("order", list(emulator.ORDERS))
def test_warp_operations_and_barriers_return_what_cuda_documents(order: str) -> None:
    values = list(range(THREADS))
    with emulator.launch(SOURCE, order=order) as run:
        out = run.output((12, THREADS), torch.int32)
        run.call("megatron_collectives", out, run.input(torch.tensor(values, dtype=torch.int32)), None)
    warps = [[value for value in values if value // 32 == warp] for warp in (0, 1)]
    ballots = [sum(1 << (value % 32) for value in warp if value % 3 == 0) for warp in warps]
    expected = [
        [t // 32 * 32 + 3 for t in values],
        [t // 8 * 8 + (t + 1) % 8 for t in values],
        [t ^ 5 for t in values],
        [t + 3 if t % 32 < 29 else t for t in values],
        [t + 3 if t % 8 < 5 else t for t in values],
        [t - 2 if t % 16 >= 2 else t for t in values],
        [ballots[t // 32] for t in values],
        [int(t < 32) for t in values],
        [int(t < 32) for t in values],
        [13] * THREADS,
        [1] * THREADS,
        [0] * THREADS,
    ]
    found = out.tensor().tolist()
    found[6] = [value % 2**32 for value in found[6]]
    assert found == expected

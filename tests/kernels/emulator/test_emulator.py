"""The emulator computes what a GPU would, and its Python interface refuses what it cannot pass on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from csrc.emulator import emulator
from csrc.emulator.harness.builds import BuildError, changed_operations, kernels
from csrc.emulator.harness.signatures import read_signatures

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


def test_what_cannot_be_passed_is_refused() -> None:
    with emulator.launch(SOURCE) as run:
        buffer = run.scratch((4,))
        with pytest.raises(ValueError, match="megatron_other is not defined in the source; it has megatron_planted"):
            run.call("megatron_other", buffer)
        with pytest.raises(ValueError, match="megatron_collectives takes 3 arguments, not 1: out, in, stream"):
            run.call("megatron_collectives", buffer)
        with pytest.raises(TypeError, match="in is a pointer; pass a buffer or None, not 7"):
            run.call("megatron_collectives", buffer, 7, None)
        with pytest.raises(ValueError, match="dtype=4294967296 does not fit into a c_int"):
            run.call("megatron_convert", buffer, buffer, 4, 2**32, False, None)
        with pytest.raises(TypeError, match="count is no pointer, but a buffer is passed for it"):
            run.call("megatron_convert", buffer, buffer, buffer, 0, False, None)


def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text('#include "base/device.h"\nextern "C" int megatron_broken(long double x) { return y; }\n')
    with pytest.raises(BuildError, match="broken.cu:2.*was not declared"):
        kernels(broken, "plain")
    with pytest.raises(ValueError, match="the type of parameter 'x' is 'long double'; launchers take int"):
        read_signatures(broken)
    with pytest.raises(ValueError, match="base/device.h has 0 times, not once: no such text"):
        changed_operations("base/device.h", "no such text", "")

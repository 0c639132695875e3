"""The CUDA kernels of the embedding, run on a CPU by the emulator."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator

CHUNK = 64
# rows of the shard, columns, ids, first row, shift behind a boundary
SMALL = [(5, 3, 70, 2, 0), (300, 40, 130, 100, 1), (300, 40, 130, 100, 0), (2, 129, 200, 0, 0), (1, 1, 1, 0, 0)]
LARGE = [(2000, 260, 1500, 500, 0), (600, 1048, 300, 200, 0), (90, 264, 700, 30, 2)]


def _ids(rows: int, count: int, first_row: int) -> torch.Tensor:
    """Ids of this shard and others; one of them is at more positions than two chunks have."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(max(0, first_row - rows // 3), first_row + rows + rows // 3 + 1, (count,), generator=generator)
    ids[count // 4 :: 2] = first_row + rows // 2
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("build", "order"), [("checked", "random"), ("plain", "reverse")])
def test_lookup_and_gradient(build: str, order: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for rows, columns, count, first_row, shift in SMALL if build == "checked" else LARGE:
        ids = _ids(rows, count, first_row)
        weight, gradient = (torch.randn(size, columns, generator=generator).to(dtype) for size in (rows, count))
        sorted_ids, positions = ids.sort(stable=True)
        chunks, place = -(-count // CHUNK), (count, rows, columns, first_row, dtype, None)
        with emulator.launch("embedding", build, order) as run:
            found = run.output([count, columns], dtype, shift=shift)
            run.call("megatron_embedding_forward", found, run.input(weight), run.input(ids), *place)
            result = run.inout(torch.zeros(rows, columns, dtype=dtype), shift=shift)
            inputs = [run.input(values) for values in (gradient, sorted_ids, positions)]
            run.call("megatron_embedding_backward", result, *inputs, run.scratch([chunks, 2, columns]), *place)
        own = (ids >= first_row) & (ids < first_row + rows)
        expected = torch.where(own.unsqueeze(1), weight[(ids - first_row).clamp(0, rows - 1)], 0)
        assert torch.equal(found.tensor(), expected)
        exact = torch.zeros(rows, columns, dtype=torch.float64)
        exact.index_add_(0, (ids - first_row)[own], gradient[own].double())
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 2e-5}
        torch.testing.assert_close(result.tensor().double(), exact, **tolerance)

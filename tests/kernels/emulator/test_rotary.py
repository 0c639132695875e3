"""The CUDA kernel of rotary positions, run in the emulator, against float64."""

from __future__ import annotations

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.rotary import rotate

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# (b, s, groups, queries of a group, d), pairs, whether cosines are float32, which buffers begin one element late
CASES = (
    ((1, 1, 1, 1, 2), 1, True, ""),
    ((2, 3, 2, 2, 32), 16, True, ""),
    ((2, 3, 1, 3, 48), 8, False, ""),
    ((1, 2, 2, 1, 7), 2, True, ""),
    ((2, 2, 1, 2, 16), 8, False, "whole parts table"),
    ((2, 1, 1, 1, 16), 8, True, "whole"),
    ((1, 2, 1, 1, 16), 8, False, "parts"),
    ((1, 2, 1, 1, 16), 8, False, "table"),
    ((1, 2, 1, 1, 16), 5, True, ""),
)


def _strides(whole: torch.Tensor) -> list[int]:
    """Of `[b, s, groups, members, d]`: sample, token, group, head."""
    return list(whole.stride()[:4])


def _grouped(heads: torch.Tensor, count: int) -> list[int]:
    """Of `[b, groups * count, s, d]`: sample, token, group, head."""
    return [heads.stride(0), heads.stride(2), heads.stride(1) * count, heads.stride(1)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("build", ["checked", "plain"])
def test_a_fused_projection_is_split_and_joined(build: str, dtype: torch.dtype, interleaved: bool) -> None:
    for number, ((batch, length, groups, queries, size), pairs, wide_table, shifted) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        qkv = torch.randn(batch, length, groups, queries + 2, size, generator=generator).to(dtype)
        per_sample = 1 if number % 2 else batch
        angles = 3 * torch.randn(per_sample, 1, length, pairs, generator=generator)
        table_dtype = torch.float32 if wide_table else dtype
        cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
        query = torch.empty(batch, groups * queries, length, size, dtype=dtype)
        key = torch.empty(batch, groups, length, size, dtype=dtype)
        late = {name: int(name in shifted.split()) for name in ("whole", "parts", "table")}
        with emulator.launch("rotary", build, ("forward", "reverse", "random")[number % 3]) as run:
            source, joined = run.input(qkv, shift=late["whole"]), run.output(qkv, shift=late["whole"])
            found = [run.output(part, shift=late["parts"]) for part in (query, key, key)]
            cosines, sines = run.input(cos, shift=late["table"]), run.input(sin, shift=late["table"])
            passed = (source, joined, *found, cosines, sines)  # by address, inside of structures
            for buffer, name in zip(passed, ("qkv", "joined", "query", "key", "value", "cos", "sin"), strict=True):
                buffer.describe(name)
            own = 0 if per_sample == 1 else cos.stride(0)
            table = run.input(torch.tensor([cosines.address, sines.address, own, cos.stride(2)]))
            sizes = run.input(torch.tensor([batch, length, size, pairs]))
            for direction in (1, -1):
                parts = []
                for index, (part, count, first) in enumerate(
                    zip((query, key, key), (queries, 1, 1), (0, queries, queries + 1), strict=True)
                ):
                    whole = source if direction == 1 else joined
                    in_whole = [whole.address + first * size * qkv.element_size(), *_strides(qkv)]
                    alone = [found[index].address, *_grouped(part, count)]
                    (start, *from_strides), (end, *to_strides) = (
                        (in_whole, alone) if direction == 1 else (alone, in_whole)
                    )
                    parts += [start, end, *from_strides, *to_strides, groups * count, count, int(index < 2)]
                table_arguments = (table, sizes, int(interleaved), float(direction), dtype, table_dtype, None)
                run.call("megatron_rotary", run.input(torch.tensor(parts)), 3, *table_arguments)
        wide = qkv.double()
        expected = [wide[..., :queries, :], wide[..., queries : queries + 1, :], wide[..., queries + 1 :, :]]
        expected = [part.flatten(2, 3).transpose(1, 2) for part in expected]
        expected[:2] = [rotate(part, cos.double(), sin.double(), interleaved=interleaved) for part in expected[:2]]
        tolerance = TOLERANCES[dtype]
        for buffer, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(buffer.tensor().double(), reference, atol=tolerance, rtol=tolerance)
        assert torch.equal(found[2].tensor().double(), expected[2])
        # Rotating back and forth changes nothing but the rounding, where cosines and sines have the length 1.
        back = joined.tensor().double()
        torch.testing.assert_close(back, wide, atol=4 * tolerance, rtol=4 * tolerance)


# (b, s, groups, queries of a group, d); the first has parts of the sums that end between samples
HEADS = ((3, 50, 2, 1, 8), (2, 3, 1, 3, 16), (1, 70, 3, 2, 24), (1, 1, 1, 1, 8))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("build", ["checked", "plain"])
def test_heads_are_joined_and_summed(build: str, dtype: torch.dtype) -> None:
    for number, (batch, length, groups, queries, size) in enumerate(HEADS):
        generator = torch.Generator().manual_seed(number)
        # Queries as attention returns them, heads first, and keys and values with heads last.
        query = torch.randn(batch, groups * queries, length, size, generator=generator).to(dtype)
        pair = torch.randn(2, batch, length, groups, size, generator=generator).to(dtype).transpose(2, 3)
        parts = [(query, queries), (pair[0], 1), (pair[1], 1)]
        grouped = [part.unflatten(1, (groups, count)) for part, count in parts]  # [b, g, count, s, d]
        expected = torch.cat(grouped, dim=2).permute(0, 3, 1, 2, 4).contiguous()
        sums_dtype = torch.float32 if number % 2 else dtype
        sums = torch.empty(expected[0, 0].numel(), dtype=sums_dtype)
        for has_sums in (False, True):
            with emulator.launch("rotary", build, ("forward", "reverse", "random")[number % 3]) as run:
                joined = run.output(expected)
                given = [run.input(part.transpose(1, 2) if index else part) for index, (part, _) in enumerate(parts)]
                for buffer, name in zip((joined, *given), ("joined", "query", "key", "value"), strict=True):
                    buffer.describe(name)
                strides = [stride for part, count in parts for stride in _grouped(part, count)]
                table = [*(buffer.address for buffer in given), *strides, batch, length, groups, queries, size]
                added = run.output(sums) if has_sums else None
                scratch = run.scratch((-(-batch * length // 64), sums.numel())) if has_sums else None
                heads = run.input(torch.tensor(table))
                run.call("megatron_join_heads", joined, added, scratch, heads, dtype, sums_dtype, None)
            assert torch.equal(joined.tensor(), expected)
            if added is not None:
                exact = expected.double().sum(dim=(0, 1)).flatten()
                tolerance = max(torch.finfo(sums_dtype).eps, 1e-6)
                torch.testing.assert_close(added.tensor().double(), exact, rtol=tolerance, atol=20 * tolerance)

"""The hashes on tensors against the same on Python's integers."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout, dropout_add
from megatron.kernels.hashing import GOLDEN, counters, low_half, mix, mix_32, mix_64, signed
from megatron.kernels.initial_values import _normal_values, _random_bits
from megatron.kernels.native.library import Library


def test_tensors_hash_as_integers_do() -> None:
    # the first output of splitmix64 from state 0, as published with xoshiro by Vigna
    assert mix(0) == 0xE220A8397B1DCDAF
    states = counters(1, 4, torch.device("cpu"))
    assert int(mix_64(states)[0]) == signed(mix(0), 64)
    assert low_half(states).tolist() == [signed(int(state) & 0xFFFFFFFF, 32) for state in states]
    assert mix_32(torch.tensor([1], dtype=torch.int32)).tolist() == [0x514E28B7]  # murmur3's finalizer of 1


@pytest.mark.full
def test_compiled_programs_hash_to_the_same_bits(compiled: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-(2**62), 2**62, (3, 140), generator=generator)
    residual, gradient = (torch.randn(3, 140, 1027, generator=generator) for _ in range(2))
    x = torch.randn(3, 140, 1027, generator=generator, requires_grad=True)

    def consumers(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = Dropout(rows[:1], 6554, GOLDEN).kept(1400)
        values = _normal_values(_random_bits(GOLDEN, rows[0, :5], 3, 40))
        return dropout_add(x, Dropout(rows, 6554, GOLDEN), residual=residual), wide, values

    backend = "inductor" if shutil.which("g++") else "aot_eager"
    traced = torch.compile(consumers, backend=backend, fullgraph=True, dynamic=False)(x, rows)
    expected = consumers(x, rows)
    assert 0.88 < expected[1].float().mean() < 0.92 and 0.8 < expected[2].std() < 1.2
    fused = dropout_add(x, Dropout(rows, 6554, GOLDEN), residual=residual, implementation=Implementation.CSRC)
    for results in (traced, (fused, *expected[1:])):
        assert all(map(torch.equal, results, expected))
        (of_x,) = torch.autograd.grad(results[0], x, gradient)
        assert torch.equal(of_x, torch.autograd.grad(expected[0], x, gradient, retain_graph=True)[0])
    torch.compiler.reset()

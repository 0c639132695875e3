"""The hashes on tensors against the same on Python's integers."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.kernels.dropout_add import Dropout
from megatron.kernels.hashing import GOLDEN, counters, low_half, mix, mix_32, mix_64, signed


def test_tensors_hash_as_integers_do() -> None:
    # the first output of splitmix64 from state 0, as published with xoshiro by Vigna
    assert mix(0) == 0xE220A8397B1DCDAF
    states = counters(1, 4, torch.device("cpu"))
    assert int(mix_64(states)[0]) == signed(mix(0), 64)
    assert low_half(states).tolist() == [signed(int(state) & 0xFFFFFFFF, 32) for state in states]
    assert mix_32(torch.tensor([1], dtype=torch.int32)).tolist() == [0x514E28B7]  # murmur3's finalizer of 1


def test_compiled_dropout_keeps_the_same_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    rows = torch.randint(-(2**62), 2**62, (3, 1400), generator=torch.Generator().manual_seed(1))
    for columns in (1027, 64):

        def kept(hashed: torch.Tensor, columns: int = columns) -> torch.Tensor:
            return Dropout(hashed, 6554, GOLDEN).kept(columns)

        backend = "inductor" if shutil.which("g++") else "aot_eager"
        compiled = torch.compile(kept, backend=backend, fullgraph=True, dynamic=False)
        expected = kept(rows)
        assert expected.numel() >= 3 * 1400 * 64 and 0.88 < expected.float().mean() < 0.92
        assert torch.equal(compiled(rows), expected)
    torch.compiler.reset()

"""The hashes on tensors against the same on Python's integers."""

from __future__ import annotations

import torch

from megatron.kernels.hashing import counters, low_half, mix, mix_32, mix_64, signed


def test_tensors_hash_as_integers_do() -> None:
    # the first output of splitmix64 from state 0, as published with xoshiro by Vigna
    assert mix(0) == 0xE220A8397B1DCDAF
    states = counters(1, 4, torch.device("cpu"))
    assert int(mix_64(states)[0]) == signed(mix(0), 64)
    assert low_half(states).tolist() == [signed(int(state) & 0xFFFFFFFF, 32) for state in states]
    assert mix_32(torch.tensor([1], dtype=torch.int32)).tolist() == [0x514E28B7]  # murmur3's finalizer of 1

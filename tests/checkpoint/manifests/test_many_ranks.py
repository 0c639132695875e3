"""A checkpoint that a thousand ranks write under ZeRO-3, with its tensors, read by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import SaveOptions
from megatron.checkpoint.storage import Storage
from megatron.errors import DamagedError
from tests.checkpoint.made.many_ranks import KINDS, Network


class FastStorage(Storage):
    """Does not wait for the disk, which a thousand files would."""

    def sync(self, handle: int) -> None:
        pass


@pytest.mark.full
def test_1024_ranks_save_and_others_load(tmp_path: Path) -> None:
    network = Network(1024, 1, 64)
    folder = network.save(tmp_path, SaveOptions(storage=FastStorage()))
    assert len(list(folder.glob("pieces_*.safetensors"))) == 1024
    parameters = 51200 * 64 + 2048 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64
    assert sum(network.load(folder, rank, 3) for rank in range(3)) == len(KINDS) * parameters
    for rank in (0, 511, 1023):
        assert network.load(folder, rank, 1024) > 0
    path = sorted(folder.glob("pieces_*.safetensors"))[512]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=path.name):
        network.load(folder, 1, 3)

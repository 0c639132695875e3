"""The reader: bytes read, memory held, and bytes that change while it reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import DamagedError, SaveOptions, load, save
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.fake_pieces import Sink, make_state, whole_sink
from tests.checkpoint.made.saved_state import MESH, CountingStorage, save_state


def big_state() -> tuple[torch.Tensor, list[tuple[PieceKey, torch.Tensor]]]:
    values = torch.arange(2 * 2**20, dtype=torch.float32)  # 8 MiB in 16 pieces
    shape = (2048, 1024)
    rows = 2048 // 16
    return values, [
        (
            PieceKey("big", "weight", shape, (part * rows, 0), ((part + 1) * rows, 1024), 0, rows * 1024),
            values[part * rows * 1024 : (part + 1) * rows * 1024],
        )
        for part in range(16)
    ]


def test_a_reader_reads_only_the_chunks_it_needs(tmp_path: Path) -> None:
    _, pieces = big_state()
    chunk_bytes = 64 * 2**10
    path = save(tmp_path, 1, pieces, {}, MESH, SaveOptions(chunk_bytes=chunk_bytes))
    piece_bytes = pieces[0][0].numel * 4
    manifest_bytes = (path / "manifest.json").stat().st_size
    storage = CountingStorage()
    sink = Sink([pieces[5]])
    load(path, sink.wanted(), MESH, storage=storage)
    sink.check()
    # once to verify whole chunks (the piece's own and the two it shares), once to copy
    assert storage.read_bytes - manifest_bytes <= 2 * piece_bytes + 2 * chunk_bytes


def peak_bytes(warm_up: Callable[[], object], work: Callable[[], object]) -> int:
    """How much more memory a forked child ever held during the work than before it.

    A forked child maps the pages of shared libraries anew when it first uses them, up to 50 MiB of torch's: that is not
    memory of the work, so something alike and small is done first, in the child.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            warm_up()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: memory may have been given back
            before = _peak_kibibytes()
            work()
            os.write(sending, str((_peak_kibibytes() - before) * 1024).encode())
        finally:
            os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    with os.fdopen(receiving) as answer:
        return int(answer.read())


def _peak_kibibytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts memory in KiB and forks safely")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_memory_stays_near_one_piece_and_one_chunk(tmp_path: Path) -> None:
    chunk_bytes, rows = 4 * 2**20, 10 * 2**10
    shape = (4 * rows, 1024)  # four pieces of 40 MiB
    values = torch.from_numpy(np.zeros((rows, 1024), dtype=np.float32))
    keys = [
        PieceKey("big", "weight", shape, (part * rows, 0), ((part + 1) * rows, 1024), 0, rows * 1024)
        for part in range(4)
    ]
    path = save(
        tmp_path, 1, [(key, values.reshape(-1)) for key in keys], {}, MESH, SaveOptions(chunk_bytes=chunk_bytes)
    )
    piece_bytes = rows * 1024 * 4

    def load_rows() -> None:
        load(path, [(key, lambda _: None) for key in keys], MESH)

    def load_column() -> None:
        column = PieceKey("big", "weight", shape, (0, 256), (4 * rows, 512), 0, rows * 1024)
        load(path, [(column, lambda _: None)], MESH)

    def load_little() -> None:
        column = PieceKey("big", "weight", shape, (0, 0), (2, 8), 0, 16)
        load(path, [(column, lambda _: None)], MESH)

    load_little()  # imports what it needs
    slack = 2 * 2**20
    for work in (load_rows, load_column):
        assert piece_bytes / 2 < peak_bytes(load_little, work) <= piece_bytes + 2 * chunk_bytes + slack


def test_bytes_that_change_between_the_passes_of_a_load_are_detected(tmp_path: Path) -> None:
    path = save_state(tmp_path)

    file = path / "pieces_00000.safetensors"

    def flip(_: torch.Tensor) -> None:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    wanted = [(key, flip) for key, _ in whole_sink(make_state()).wanted()]
    with pytest.raises(DamagedError, match=r"changed between bytes \d+ and \d+ \(tensor .*\) while it was read"):
        load(path, wanted, MESH)

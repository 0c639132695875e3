"""The tables of an index: damage is refused and located; both layouts are read."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from megatron.data.formats import token_index
from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import DataError
from tests.data.corpora import write_corpus
from tests.data.formats.golden_pairs import GOLDEN_BIN, GOLDEN_CACHED_IDX, GOLDEN_IDX, altered, store

DAMAGE = {
    "magic": (b"X" + GOLDEN_IDX[1:], GOLDEN_BIN, r"pair\.idx: .* begins with b'XMIDIDX"),
    "empty index": (b"", GOLDEN_BIN, r"pair\.idx: the file \(0 bytes\)"),
    "header cut": (GOLDEN_IDX[:30], GOLDEN_BIN, "has 30 bytes, its header alone takes 34"),
    "version": (altered(9, "<Q", 2), GOLDEN_BIN, r"layout version 2 \(byte offset 9\)"),
    "dtype code": (altered(17, "<B", 9), GOLDEN_BIN, r"dtype code 9 \(byte offset 17\)"),
    "sequence count": (
        altered(18, "<Q", 4),
        GOLDEN_BIN,
        "announces 4 sequences and 3 document entries, which take 106",
    ),
    "huge count": (altered(18, "<Q", 2**63), GOLDEN_BIN, f"announces {2**63} sequences"),
    "tables cut": (GOLDEN_IDX[:-1], GOLDEN_BIN, "take 94 bytes; the file has 93"),
    "negative length": (altered(38, "<i", -5), GOLDEN_BIN, r"length 1 \(byte offset 38\) is -5"),
    "long length": (altered(42, "<i", 5), GOLDEN_BIN, r"sequence 2 .* ends at 20, but .*pair\.bin ends at 18"),
    "odd pointer": (altered(54, "<q", 7), GOLDEN_BIN, r"pointer 1 \(byte offset 54\) is 7; it must be 6"),
    "far pointer": (altered(62, "<q", 2**40), GOLDEN_BIN, rf"pointer 2 \(byte offset 62\) is {2**40}; it must be 10"),
    "first document": (altered(70, "<q", 1), GOLDEN_BIN, r"document 0 \(byte offset 70\) is 1; it must be 0"),
    "falling document": (altered(78, "<q", -1), GOLDEN_BIN, r"document 1 \(byte offset 78\) is -1"),
    "far document": (altered(78, "<q", 4), GOLDEN_BIN, r"document 1 \(byte offset 78\) is 4; .*sequences \(3\)"),
    "last document": (altered(86, "<q", 2), GOLDEN_BIN, r"document 2 \(byte offset 86\) is 2; it must be the number"),
    "no documents": (altered(26, "<Q", 0)[:70], GOLDEN_BIN, "document table .byte offset 70. is empty"),
    "bin cut": (GOLDEN_IDX, GOLDEN_BIN[:-1], r"sequence 2 .* ends at 18, but .*pair\.bin ends at 17"),
    "bin too long": (GOLDEN_IDX, GOLDEN_BIN + b"\0", r"pair\.bin: the file has 1 bytes after byte offset 18"),
    "cached header": (GOLDEN_CACHED_IDX[:20], bytes(36), "has 20 bytes, its header alone takes 56"),
    "cached cut": (GOLDEN_CACHED_IDX[:-8], bytes(36), "take 168 bytes; the file has 160"),
    "cached sizes": (
        altered(48, "<Q", 2, altered(40, "<Q", 4, GOLDEN_CACHED_IDX)),
        bytes(36),
        "4 sizes for 3 sequences",
    ),
    "cached element": (altered(24, "<Q", 2, GOLDEN_CACHED_IDX), bytes(36), "byte offset 24 says 2 bytes per element"),
    "cached dimension": (altered(64, "<q", 2, GOLDEN_CACHED_IDX), bytes(36), r"dimension offset 1 \(byte offset 64\)"),
    "cached size": (altered(120, "<q", -1, GOLDEN_CACHED_IDX), bytes(36), r"length 0 \(byte offset 120\) is -1"),
    "cached offset": (altered(96, "<q", 2, GOLDEN_CACHED_IDX), bytes(36), r"data offset 1 \(byte offset 96\) is 2"),
    "cached end": (altered(112, "<q", 8, GOLDEN_CACHED_IDX), bytes(36), r"last data offset \(byte offset 112\) is 8"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_located(tmp_path, kind):
    idx, tokens, message = DAMAGE[kind]
    with pytest.raises(DataError, match=message):
        IndexedDataset(store(tmp_path, idx, tokens))


def test_the_ambiguous_float_code_follows_the_size_of_the_bin_file(tmp_path):
    idx = bytearray(GOLDEN_IDX)
    idx[17] = 7
    for itemsize, dtype in ((8, np.float64), (4, np.float32)):
        struct.pack_into("<3q", idx, 46, 0, 3 * itemsize, 5 * itemsize)
        assert IndexedDataset(store(tmp_path, bytes(idx), bytes(9 * itemsize))).dtype == dtype


def test_multimodal_modes_are_read(tmp_path):
    assert IndexedDataset(store(tmp_path, GOLDEN_IDX + b"\0\1\0", GOLDEN_BIN)).modes.tolist() == [0, 1, 0]


def test_an_idx_file_cut_while_it_is_open_gives_an_error_and_no_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "_MAPPED_ABOVE_BYTES", 0)
    prefix = write_corpus(tmp_path / "pair", [1] * 5000, dtype=np.uint16)
    dataset = IndexedDataset(prefix)
    os.truncate(prefix + ".idx", 100)
    with pytest.raises(DataError, match=r"pair\.idx: the file has 100 bytes and had \d+ when it was opened"):
        dataset.get(4999)
    with pytest.raises(DataError, match=r"It was truncated while in use"):
        _ = dataset.fingerprint


def test_mutations_are_refused_or_harmless(tmp_path):
    """Bit flips, cuts, zeroed and repeated stretches of both files: a typed error, or tokens inside the file."""
    write_corpus(tmp_path / "good", [5, 0, 9, 3, 12, 7, 1], dtype=np.uint16)
    good = {suffix: (tmp_path / f"good.{suffix}").read_bytes() for suffix in ("idx", "bin")}
    random = np.random.RandomState(0)
    refused = 0
    for _ in range(300):
        suffix = "idx" if random.rand() < 0.8 else "bin"
        mutant = dict(good, **{suffix: mutated(good[suffix], random)})
        prefix = store(tmp_path, mutant["idx"], mutant["bin"])
        try:
            dataset = IndexedDataset(prefix)
        except DataError as failure:
            assert "pair." in str(failure)
            refused += 1
            continue
        assert sum(len(row) for row in dataset[:]) * dataset.dtype.itemsize == len(mutant["bin"])
    assert refused > 200


def mutated(data: bytes, random: np.random.RandomState) -> bytes:
    changed = bytearray(data)
    kind, at = random.randint(5), random.randint(len(data))
    if kind == 0:
        changed[at] ^= 1 << random.randint(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:
        changed[at : at + 8] = bytes(len(changed[at : at + 8]))
    elif kind == 3:
        changed[at:at] = changed[at : at + random.randint(1, 20)]
    else:
        changed[at : at + 4] = random.bytes(len(changed[at : at + 4]))
    return bytes(changed)

"""Reading token files: the golden tokens, both layouts, and every kind of damage refused and located."""

import os
import struct

import numpy as np
import pytest

from megatron.data.formats import indexed
from megatron.data.formats.indexed import IndexedDataset, check_pair
from megatron.errors import DataError
from tests.data.corpora import write_corpus
from tests.data.formats.golden_pairs import GOLDEN_BIN, GOLDEN_CACHED_IDX, GOLDEN_IDX, altered, store

DAMAGE = {
    "magic": (b"X" + GOLDEN_IDX[1:], GOLDEN_BIN, r"pair\.idx: .* begins with b'XMIDIDX"),
    "empty index": (b"", GOLDEN_BIN, r"pair\.idx: the file \(0 bytes\)"),
    "header cut": (GOLDEN_IDX[:30], GOLDEN_BIN, "has 30 bytes, less than the header's 34"),
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
    "cached header": (GOLDEN_CACHED_IDX[:20], bytes(36), "has 20 bytes, less than the header's 56"),
    "cached cut": (GOLDEN_CACHED_IDX[:-8], bytes(36), "take 168 bytes; the file has 160"),
    "cached sizes": (
        altered(48, "<Q", 2, altered(40, "<Q", 4, GOLDEN_CACHED_IDX)),
        bytes(36),
        "4 sizes for 3 sequences",
    ),
    "cached element": (altered(24, "<Q", 2, GOLDEN_CACHED_IDX), bytes(36), r"2 bytes per element \(byte offset 24\)"),
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


@pytest.mark.parametrize("layout", ["mmap", "cached"])
def test_reader_gives_the_golden_tokens(tmp_path, layout):
    wide = np.frombuffer(GOLDEN_BIN, "<u2").astype("<i4").tobytes()
    pair = (GOLDEN_IDX, GOLDEN_BIN) if layout == "mmap" else (GOLDEN_CACHED_IDX, wide)
    dataset = IndexedDataset(store(tmp_path, *pair))
    assert len(dataset) == 3 and dataset.tokens == 9
    assert dataset.lengths.tolist() == [3, 2, 4] and dataset.lengths.dtype == np.int32
    assert dataset.documents.tolist() == [0, 2, 3]
    assert dataset.pointers.tolist() == [first * dataset.dtype.itemsize for first in (0, 3, 5)]
    assert [row.tolist() for row in dataset[0:3]] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert dataset.get(2, offset=1, length=2).tolist() == [7, 8] and dataset.get(2, offset=3).tolist() == [9]
    assert dataset[np.int64(1)].tolist() == [4, 5] and dataset[-1].tolist() == [6, 7, 8, 9]
    assert dataset.get(np.int32(0), np.uint8(1), np.int16(0)).tolist() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus", "corpus.idx does not exist .*The folder holds .*corpus_text_document"),
        ("corpus_text_document.bin", "given without its suffix: use .*corpus_text_document"),
        ("elsewhere/corpus", r"The folder /.*/elsewhere does not exist either\. Give another prefix\.$"),
    ],
)
def test_a_missing_file_is_named_with_a_suggestion(tmp_path, name, message):
    write_corpus(tmp_path / "corpus_text_document", [3])
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / name)


def test_a_text_in_place_of_token_files_is_named_with_what_makes_them(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("one\n")
    with pytest.raises(
        DataError,
        match=r"novel\.txt \(a data path\) is a file, not token files.*preprocess_data\.py.*train_on_text\.py",
    ):
        IndexedDataset(path)


def test_an_unreadable_file_is_a_data_error(tmp_path, monkeypatch):
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(arguments[0]))

    monkeypatch.setattr(indexed, "read_token_index", refused)
    with pytest.raises(DataError, match=r"Cannot read .*corpus\.idx: Permission denied"):
        IndexedDataset(write_corpus(tmp_path / "corpus", [3]))


def test_reading_outside_a_sequence_is_an_index_error(tmp_path):
    dataset = IndexedDataset(store(tmp_path, GOLDEN_IDX, GOLDEN_BIN))
    with pytest.raises(IndexError, match="Sequence 3 is out of range: .* has 3 sequences"):
        dataset[3]
    with pytest.raises(IndexError, match="sequence 1 has 2 tokens; tokens 1 to 3 do not exist"):
        dataset.get(1, offset=1, length=2)
    with pytest.raises(IndexError, match="tokens 0 to -1"):
        dataset.get(1, length=-1)
    with pytest.raises(ValueError, match="step 2"):
        dataset[0:3:2]


def test_a_bin_file_cut_while_it_is_open_gives_an_error_and_no_stray_tokens(tmp_path):
    dataset = IndexedDataset(store(tmp_path, GOLDEN_IDX, GOLDEN_BIN))
    os.truncate(tmp_path / "pair.bin", 12)
    assert dataset[0].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"pair\.bin: the file ended 6 bytes short of byte offset 18"):
        dataset[2]


def test_other_tokens_under_the_same_lengths_have_another_fingerprint(tmp_path):
    for name, first in (("a", 0), ("b", 1), ("c", 0)):
        write_corpus(tmp_path / name, [3, 2], first_id=first)
    prints = [IndexedDataset(tmp_path / name).fingerprint for name in "abc"]
    assert prints[0] == prints[2] != prints[1]


def test_tables_longer_than_a_chunk_are_checked(tmp_path, monkeypatch):
    write_corpus(tmp_path / "whole", range(10))
    monkeypatch.setattr(indexed, "_CHUNK_ENTRIES", 3)
    idx, tokens = ((tmp_path / f"whole.{suffix}").read_bytes() for suffix in ("idx", "bin"))
    assert IndexedDataset(store(tmp_path, idx, tokens)).lengths.tolist() == list(range(10))
    for offset, layout, message in (
        (34 + 4 * 7, "<i", r"length 7 \(byte offset 62\)"),
        (74 + 8 * 6, "<q", r"pointer 6 \(byte offset 122\) is -9; it must be 60"),
        (154 + 8 * 8, "<q", r"document 8 \(byte offset 218\) is -9; .* previous entry \(7\)"),
    ):
        with pytest.raises(DataError, match=message):
            IndexedDataset(store(tmp_path, altered(offset, layout, -9, idx), tokens))


def test_offsets_beyond_two_gigabytes(tmp_path):
    """A fabricated pair whose .bin is a sparse file of 5 GB."""
    lengths = np.full(5, 2**29, np.int32)
    pointers = np.arange(5, dtype=np.int64) * 2**30
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 5, 6)
    idx = header + lengths.tobytes() + pointers.tobytes() + np.arange(6, dtype=np.int64).tobytes()
    prefix = store(tmp_path, idx, b"")
    with open(prefix + ".bin", "r+b") as stream:
        stream.truncate(5 * 2**30)
        stream.seek(5 * 2**30 - 4)
        stream.write(np.array([7, 8], "<u2").tobytes())
    dataset = IndexedDataset(prefix)
    assert dataset.get(4, 2**29 - 2).tolist() == [7, 8] and dataset.tokens == 5 * 2**29


def test_a_pair_is_recognized_without_reading_its_tables(tmp_path, monkeypatch):
    for idx in (GOLDEN_IDX, GOLDEN_CACHED_IDX):
        check_pair(store(tmp_path, idx, GOLDEN_BIN))
    prefix = store(tmp_path, b"PK\x03\x04 and more", GOLDEN_BIN)
    with pytest.raises(DataError, match=r"pair.idx: the file \(13 bytes\) begins with b'PK.*a token index begins"):
        check_pair(prefix)
    with pytest.raises(DataError, match=r"none.idx does not exist \(data prefix "):
        check_pair(str(tmp_path / "none"))

    def refuse(path, *options):
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(indexed, "open_plain", refuse)
    with pytest.raises(DataError, match=r"Cannot read .*pair.bin: no"):
        check_pair(prefix)


def test_the_ambiguous_float_code_follows_the_size_of_the_bin_file(tmp_path):
    idx = bytearray(GOLDEN_IDX)
    idx[17] = 7
    for itemsize, dtype in ((8, np.float64), (4, np.float32)):
        struct.pack_into("<3q", idx, 46, 0, 3 * itemsize, 5 * itemsize)
        assert IndexedDataset(store(tmp_path, bytes(idx), bytes(9 * itemsize))).dtype == dtype


def test_an_idx_file_cut_while_it_is_open_gives_an_error_and_no_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_MAPPED_ABOVE_BYTES", 0)
    prefix = write_corpus(tmp_path / "pair", [1] * 5000, dtype=np.uint16)
    dataset = IndexedDataset(prefix)
    os.truncate(prefix + ".idx", 100)
    with pytest.raises(DataError, match=r"pair\.idx: the file has 100 bytes and had \d+ when it was opened"):
        dataset.get(4999)
    with pytest.raises(DataError, match=r"It was truncated while in use"):
        _ = dataset.fingerprint

"""Token files: the golden bytes, every kind of damage, and writing that never leaves half a pair."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.data.formats import indexed, token_index
from megatron.data.formats.indexed import IndexedDataset, IndexedWriter, check_pair, width_for
from megatron.errors import DataError, StorageError
from tests.data.corpora import write_corpus
from tests.data.formats.golden_pairs import GOLDEN_BIN, GOLDEN_CACHED_IDX, GOLDEN_IDX, altered, store

FIXTURE = Path(__file__).parents[4] / "shared/data/megatron_fixture/meg-gpt2-openwebtext_text_document"


def test_writer_gives_the_golden_bytes(tmp_path):
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document([[1, 2, 3], np.array([4, 5])])
        writer.add_document([[6, 7, 8, 9]])
    assert (tmp_path / "pair.idx").read_bytes() == GOLDEN_IDX
    assert (tmp_path / "pair.bin").read_bytes() == GOLDEN_BIN
    assert sorted(os.listdir(tmp_path)) == ["pair.bin", "pair.idx"]


def test_writer_gives_the_golden_bytes_of_the_cached_layout(tmp_path):
    with IndexedWriter(tmp_path / "pair", width_for(50257, is_cached=True), is_cached=True) as writer:
        writer.add_document([[1, 2, 3], np.array([4, 5])])
        writer.add_document([[6, 7, 8, 9]])
    assert (tmp_path / "pair.idx").read_bytes() == GOLDEN_CACHED_IDX
    assert (tmp_path / "pair.bin").read_bytes() == np.frombuffer(GOLDEN_BIN, "<u2").astype("<i4").tobytes()
    assert IndexedDataset(tmp_path / "pair").is_cached


@pytest.mark.parametrize("is_cached", [False, True])
def test_tables_written_in_chunks_equal_those_written_at_once(tmp_path, is_cached, monkeypatch):
    lengths = np.random.default_rng(3).integers(0, 9, 100)
    for name, entries in (("one", 1000), ("many", 7)):
        monkeypatch.setattr(indexed, "_COPY_ENTRIES", entries)
        with IndexedWriter(tmp_path / name, np.int32, is_cached=is_cached) as writer:
            writer.add_batch(np.arange(lengths.sum()), lengths, [40, 0, 60])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()
    dataset = IndexedDataset(tmp_path / "many")
    assert dataset.lengths.tolist() == lengths.tolist() and dataset.documents.tolist() == [0, 40, 40, 100]
    assert (
        dataset.is_cached == is_cached and dataset.get(99).tolist() == np.arange(lengths.sum())[-lengths[99] :].tolist()
    )


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


def test_batches_and_documents_give_the_same_bytes(tmp_path):
    write_one = np.arange(20)
    with IndexedWriter(tmp_path / "documents", np.int32) as writer:
        writer.add_document([write_one[:5], write_one[5:5], write_one[5:9]])
        writer.add_document([])
        writer.add_document([write_one[9:]])
    with IndexedWriter(tmp_path / "batch", np.int32) as writer:
        writer.add_batch(write_one, [5, 0, 4, 11], [3, 0, 1])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"documents.{suffix}").read_bytes() == (tmp_path / f"batch.{suffix}").read_bytes()
    assert IndexedDataset(tmp_path / "batch").documents.tolist() == [0, 3, 3, 4]


def test_merging_shifts_the_documents(tmp_path):
    first = IndexedDataset(write_corpus(tmp_path / "a", [3, 2]))
    second = IndexedDataset(write_corpus(tmp_path / "b", [4], first_id=5))
    with IndexedWriter(tmp_path / "both", np.int32) as writer:
        writer.add_dataset(first)
        writer.add_dataset(second)
    write_corpus(tmp_path / "whole", [3, 2, 4])
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"both.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    with IndexedWriter(tmp_path / "narrow", np.uint16) as writer, pytest.raises(DataError, match="int32 .*uint16"):
        writer.add_dataset(first)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_pair_without_sequences_can_be_written_and_read(tmp_path, is_cached):
    with IndexedWriter(tmp_path / "empty", np.uint16, is_cached=is_cached):
        pass
    dataset = IndexedDataset(tmp_path / "empty")
    assert len(dataset) == 0 and dataset.tokens == 0 and dataset.documents.tolist() == [0] and dataset[:] == []


def test_width_rule():
    assert width_for(65499) == np.uint16 and width_for(65500) == np.int32 and width_for(None) == np.int32


@pytest.mark.skipif(not FIXTURE.with_suffix(".idx").exists(), reason=f"{FIXTURE} is not here")
def test_upstreams_own_file_is_rewritten_byte_for_byte(tmp_path):
    dataset = IndexedDataset(FIXTURE)
    assert (len(dataset), len(dataset.documents), dataset.dtype) == (1000, 1001, np.uint16)
    with IndexedWriter(tmp_path / "again", dataset.dtype) as writer:
        for document, start in enumerate(dataset.documents[:-1]):
            writer.add_document(dataset[int(start) : int(dataset.documents[document + 1])])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == FIXTURE.with_suffix(suffix).read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corpus", "corpus.idx does not exist .*That folder holds .*corpus_text_document"),
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


def test_a_folder_without_a_corpus_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"nope\.idx does not .*The folder {tmp_path} holds no \.idx file\. Give another"
    ):
        IndexedDataset("nope")


def test_an_unreadable_file_is_a_data_error(tmp_path, monkeypatch):
    def refused(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(arguments[0]))

    monkeypatch.setattr(indexed, "read_token_index", refused)
    with pytest.raises(DataError, match=r"Cannot read .*corpus\.idx: Permission denied"):
        IndexedDataset(write_corpus(tmp_path / "corpus", [3]))


def test_reading_outside_a_sequence_is_an_index_error(tmp_path):
    dataset = IndexedDataset(store(tmp_path, GOLDEN_IDX, GOLDEN_BIN))
    with pytest.raises(IndexError, match="has 3 sequences; there is no sequence 3"):
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


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="halfway"), IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document([[1]])
        raise RuntimeError("halfway")
    assert os.listdir(tmp_path) == []


def test_an_old_pair_is_replaced_completely(tmp_path):
    write_corpus(tmp_path / "pair", [2, 2])
    write_corpus(tmp_path / "pair", [5])
    assert IndexedDataset(tmp_path / "pair").lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("tokens", "lengths", "documents", "message"),
    [
        ([70000], [1], None, "token id 70000 does not fit uint16"),
        ([-1], [1], None, "token id -1 does not fit uint16"),
        ([1.5], [1], None, "must be a row of integers, not 1-D float64"),
        ([[1, 2]], [2], None, "not 2-D int64"),
        ([1, 2], [1], None, "2 tokens were given, but the lengths sum to 1"),
        ([1, 2], [3, -1], None, "a sequence of -1 tokens"),
        ([1, 2], [1, 1], [1], "2 sequences were given, but the documents hold 1"),
    ],
)
def test_values_that_do_not_fit_are_rejected(tmp_path, tokens, lengths, documents, message):
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer, pytest.raises(DataError, match=message):
        writer.add_batch(tokens, lengths, documents)


def test_float_files_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match="cannot be written as float32"):
        IndexedWriter(tmp_path / "pair", np.float32)


def test_a_failed_write_names_the_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/pair\.bin: "):
        IndexedWriter(tmp_path / "file" / "pair", np.uint16)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
@pytest.mark.parametrize("stream", ["_bin", "_lengths"])
def test_a_full_disk_names_the_path_and_leaves_nothing(tmp_path, stream):
    with (
        pytest.raises(StorageError, match="Cannot write .*No space left on device .*bytes are free"),
        IndexedWriter(tmp_path / "pair", np.uint16) as writer,
    ):
        setattr(writer, stream, open("/dev/full", "r+b", buffering=0))
        writer.add_document([np.arange(1000)])
    assert os.listdir(tmp_path) == []


def test_pickling_keeps_the_path_only(tmp_path):
    dataset = IndexedDataset(store(tmp_path, GOLDEN_IDX, GOLDEN_BIN))
    kind, arguments = dataset.__reduce__()
    assert kind(*arguments)[1].tolist() == [4, 5] and repr(dataset).endswith("sequences=3, tokens=9, dtype=uint16)")


def test_other_tokens_under_the_same_lengths_have_another_fingerprint(tmp_path):
    for name, first in (("a", 0), ("b", 1), ("c", 0)):
        write_corpus(tmp_path / name, [3, 2], first_id=first)
    prints = [IndexedDataset(tmp_path / name).fingerprint for name in "abc"]
    assert prints[0] == prints[2] != prints[1]


def test_tables_longer_than_a_chunk_are_written_merged_and_checked(tmp_path, monkeypatch):
    write_corpus(tmp_path / "whole", range(10))
    monkeypatch.setattr(token_index, "_CHUNK_ENTRIES", 3)
    monkeypatch.setattr(indexed, "_COPY_ENTRIES", 3)
    monkeypatch.setattr(indexed, "_COPY_BYTES", 7)
    with IndexedWriter(tmp_path / "chunked", np.int32) as writer:
        writer.add_dataset(IndexedDataset(tmp_path / "whole"))
    idx = (tmp_path / "whole.idx").read_bytes()
    assert (tmp_path / "chunked.idx").read_bytes() == idx
    assert (tmp_path / "chunked.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    tokens = (tmp_path / "whole.bin").read_bytes()
    for offset, layout, message in (
        (34 + 4 * 7, "<i", r"length 7 \(byte offset 62\)"),
        (74 + 8 * 6, "<q", r"pointer 6 \(byte offset 122\) is -9; it must be 60"),
        (154 + 8 * 8, "<q", r"document 8 \(byte offset 218\) is -9; .* before it \(7\)"),
    ):
        with pytest.raises(DataError, match=message):
            IndexedDataset(store(tmp_path, altered(offset, layout, -9, idx), tokens))


def test_the_memory_of_a_writer_does_not_grow_with_the_data(tmp_path):
    lengths = np.ones(10_000, np.int32)
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_batch(lengths, lengths)
        tracemalloc.start()
        for _ in range(100):
            writer.add_batch(lengths, lengths)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert writer.sequences == 1_010_000 and peak_bytes < 2_000_000


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


@settings(max_examples=30, deadline=None)
@given(
    strategies.lists(
        strategies.lists(strategies.lists(strategies.integers(0, 65535), max_size=5), max_size=4), max_size=6
    )
)
def test_written_data_is_read_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("pair") / "pair"
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, np.uint16) for sequence in document])
    dataset = IndexedDataset(prefix)
    assert [row.tolist() for row in dataset[:]] == [sequence for document in documents for sequence in document]
    assert np.diff(dataset.documents).tolist() == [len(document) for document in documents]


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

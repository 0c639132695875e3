"""Writing token files: the golden bytes, chunked tables, and nothing left behind by a failure."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.data.formats import indexed_writer
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter, width_for
from megatron.errors import DataError, StorageError
from tests.data.formats.golden_pairs import GOLDEN_BIN, GOLDEN_CACHED_IDX, GOLDEN_IDX

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
        monkeypatch.setattr(indexed_writer, "_COPY_ENTRIES", entries)
        with IndexedWriter(tmp_path / name, np.int32, is_cached=is_cached) as writer:
            writer.add_batch(np.arange(lengths.sum()), lengths, [40, 0, 60])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()
    dataset = IndexedDataset(tmp_path / "many")
    assert dataset.lengths.tolist() == lengths.tolist() and dataset.documents.tolist() == [0, 40, 40, 100]
    assert (
        dataset.is_cached == is_cached and dataset.get(99).tolist() == np.arange(lengths.sum())[-lengths[99] :].tolist()
    )


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


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="halfway"), IndexedWriter(tmp_path / "pair", np.uint16) as writer:
        writer.add_document([[1]])
        raise RuntimeError("halfway")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tokens", "lengths", "documents", "message"),
    [
        ([70000], [1], None, "token id 70000 does not fit uint16"),
        ([-1], [1], None, "token id -1 does not fit uint16"),
        ([1.5], [1], None, "must be 1-D integers, not 1-D float64"),
        ([[1, 2]], [2], None, "not 2-D int64"),
        ([1, 2], [1], None, "got 2 tokens, but the lengths sum to 1"),
        ([1, 2], [3, -1], None, "invalid length of a sequence: -1 tokens"),
        ([1, 2], [1, 1], [1], "got 2 sequences, but the documents hold 1"),
    ],
)
def test_values_that_do_not_fit_are_rejected(tmp_path, tokens, lengths, documents, message):
    with IndexedWriter(tmp_path / "pair", np.uint16) as writer, pytest.raises(DataError, match=message):
        writer.add_batch(tokens, lengths, documents)


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

"""What the check finds in a pair of token files, and what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import Sidecar
from megatron.errors import DataError
from megatron.tokenizers.record import TokenizerRecord
from tests.data.corpora import write_sidecar
from tools.corpus import examination as check_module
from tools.corpus.examination import examine, report, sample_documents

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[1, 2, 3]], [[1], [2, 3]], [[7] * 100], []]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return str(tmp_path / "data")


def sidecar(dataset: IndexedDataset) -> Sidecar:
    counts = (len(dataset.documents) - 1, 0, 0, len(dataset), dataset.tokens)
    return Sidecar(*counts, False, TokenizerRecord("t", "f", 8, 0))


@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
def test_counts_lengths_and_duplicates(prefix: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_CHUNK_TOKENS", piece)
    found = examine(prefix)
    assert (found.documents, found.sequences, found.tokens) == (7, 7, 112)
    assert (found.empty, found.shortest, found.median, found.longest) == (2, 0, 3.0, 100)
    assert found.histogram == [(0, 2), (1, 0), (2, 4), (4, 0), (8, 0), (16, 0), (32, 0), (64, 1)]
    assert found.duplicates == 2 and found.shown_duplicates == [(0, 3), (3, 4)]  # empty documents are none
    text = "\n".join(report(found))
    assert "7 documents, 7 sequences, 112 tokens of int32" in text and "unknown (no sidecar" in text
    assert "64-127 |##########" in text and "duplicates: 2 documents: 3 (as 0), 4 (as 3)" in text


def test_ids_outside_of_the_vocabulary(prefix: str) -> None:
    assert examine(prefix, 8).out_of_range == 0
    assert "ids: all in 0 to 7" in "\n".join(report(examine(prefix, 8)))
    found = examine(prefix, 6)
    assert (found.out_of_range, found.first_out_of_range) == (101, "sequence 2, token 1: id 6")
    assert "101 lie outside of 0 to 5, the first at sequence 2, token 1: id 6" in "\n".join(report(found))
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_document([[3, -1]])
    assert examine(prefix, 6).first_out_of_range == "sequence 0, token 1: id -1"


def test_the_sidecar_gives_the_vocabulary_and_must_agree(prefix: str) -> None:
    ours = sidecar(IndexedDataset(prefix))
    write_sidecar(prefix, ours)
    assert examine(prefix).vocab_size == 8
    write_sidecar(prefix, replace(ours, tokens=111))
    with pytest.raises(DataError, match=r"data\.json lists 7 sequences, 7 documents and 111 tokens; the pair has 7"):
        examine(prefix)


def test_samples_are_spread_and_empty_pairs_are_supported(prefix: str, tmp_path: Path) -> None:
    shown = list(sample_documents(IndexedDataset(prefix), 3))
    assert [number for number, _ in shown] == [0, 2, 4]
    assert [ids.tolist() for _, ids in shown] == [[1, 2, 3], [], [1, 2, 3]]
    assert len(list(sample_documents(IndexedDataset(prefix), 99))) == 7
    with IndexedWriter(tmp_path / "none", np.uint16):
        pass
    found = examine(f"{tmp_path}/none", 10)
    assert (found.documents, found.histogram, found.duplicates) == (0, [], 0) and len(report(found)) == 3
    assert list(sample_documents(IndexedDataset(tmp_path / "none"), 3)) == []

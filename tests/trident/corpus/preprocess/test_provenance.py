"""The sidecar that preprocessing writes: its counts, and sizes and hashes of the sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import SourceRecord, read_sidecar
from megatron.errors import DataError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.inputs.block import InputBlock
from trident.corpus.preprocess import provenance
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.preprocess.provenance import SourceLog

xxhash = pytest.importorskip("xxhash")


def test_counts_tokenizer_and_hashes_of_every_key(tmp_path: Path, choice: TokenizerChoice) -> None:
    lines = [{"a": f"text {number}", "b": "" if number % 3 else "b"} for number in range(300)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "1.jsonl").write_bytes(data)
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(data + b"bad\n"))
    inputs = (f"{tmp_path}/1.jsonl", f"{tmp_path}/2.jsonl.gz")
    options = EncodeOptions(choice, keys=("a", "b"), append_eod=True, skip_bad_lines=True)
    preprocess(inputs, f"{tmp_path}/out", options, 2, quiet(), 1024)
    tokenizer = build_tokenizer(choice)
    for key, documents, empty in (("a", 600, 0), ("b", 200, 400)):
        sidecar, pair = read_sidecar(f"{tmp_path}/out_{key}_document"), IndexedDataset(f"{tmp_path}/out_{key}_document")
        assert sidecar is not None and sidecar.append_eod
        assert (sidecar.documents, sidecar.empty, sidecar.skipped) == (documents, empty, 1)
        assert (sidecar.sequences, sidecar.tokens) == (len(pair), pair.tokens)
        assert sidecar.tokenizer == TokenizerRecord.of(tokenizer) and "numpy" in sidecar.versions
        assert sidecar.sources == (
            SourceRecord(inputs[0], len(data), xxhash.xxh3_64(data).hexdigest()),
            SourceRecord(inputs[1], len(data) + 4, xxhash.xxh3_64(data + b"bad\n").hexdigest()),
        )


def test_sizes_alone_without_the_package_and_for_unreadable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SourceLog()
    assert len(list(log.watch([InputBlock(f"{tmp_path}/gone", 0, 5, None, 5)]))) == 1
    assert log.records() == (SourceRecord(f"{tmp_path}/gone", 5, None),)
    monkeypatch.setattr(provenance, "_hash_maker", lambda: None)
    log = SourceLog()
    list(log.watch([InputBlock("<stdin>", 0, 3, b"abc", 0), InputBlock("<stdin>", 3, 2, b"de", 0)]))
    assert log.records() == (SourceRecord("<stdin>", 5, None),)


def test_a_parquet_file_counts_with_its_size_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 some rows PAR1")
    log = SourceLog()
    list(log.watch([InputBlock(str(path), start, 3, b"abc", 0, "parquet") for start in (0, 3)]))
    assert log.records() == (SourceRecord(str(path), 19, xxhash.xxh3_64(path.read_bytes()).hexdigest()),)


def test_a_rewritten_pair_loses_its_old_sidecar(tmp_path: Path, choice: TokenizerChoice) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    preprocess((f"{tmp_path}/in.jsonl",), f"{tmp_path}/out", EncodeOptions(choice), 1, quiet())
    assert read_sidecar(tmp_path / "out_text_document") is not None
    with IndexedWriter(tmp_path / "out_text_document", "uint16") as writer:
        writer.add_document([[1]])
    assert not (tmp_path / "out_text_document.json").exists()


def test_a_foreign_file_is_not_overwritten(tmp_path: Path, choice: TokenizerChoice) -> None:
    (tmp_path / "in_text_document.json").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"in_text_document\.json exists and does not describe token files"):
        preprocess((f"{tmp_path}/in_text_document.json",), f"{tmp_path}/in", EncodeOptions(choice), 1, quiet())

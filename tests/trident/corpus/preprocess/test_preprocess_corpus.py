"""From jsonl to token files: the right ids, the same bytes for any number of workers, and nothing half-published."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import DataError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.preprocess_runs import pair_bytes, run, write_numbered_lines
from trident.corpus.preprocess.encode import EncodeOptions


@pytest.mark.parametrize("append_eod", [False, True])
def test_every_document_is_present_in_order(tmp_path: Path, choice: TokenizerChoice, append_eod: bool) -> None:
    texts = hard_documents(400)
    result = run(
        [write_numbered_lines(tmp_path / "in.jsonl", texts)],
        tmp_path / "out",
        EncodeOptions(choice, append_eod=append_eod),
    )
    tokenizer = build_tokenizer(choice)
    expected = [tokenizer.encode(text) + [tokenizer.eod_id] * append_eod for text in texts if text]
    data = IndexedDataset(tmp_path / "out_text_document")
    assert [data[index].tolist() for index in range(len(data))] == expected
    assert data.documents.tolist() == list(range(len(expected) + 1)) and data.dtype == np.uint16
    assert result.documents == len(expected) and result.empty == len(texts) - len(expected)
    assert result.tokens == sum(map(len, expected))


def test_same_bytes_for_any_workers_blocks_and_compression(tmp_path: Path, choice: TokenizerChoice) -> None:
    texts = hard_documents(700)
    plain = write_numbered_lines(tmp_path / "in.jsonl", texts)
    first, second = write_numbered_lines(tmp_path / "1.jsonl", texts[:300]), tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(write_numbered_lines(tmp_path / "2.jsonl", texts[300:]).read_bytes()))
    options = EncodeOptions(choice, append_eod=True)
    run([plain], tmp_path / "one", options)
    expected = pair_bytes(tmp_path / "one_text_document")
    for name, inputs, workers, block_bytes in (
        ("big", [plain], 1, 1 << 30),
        ("two", [plain], 2, 3000),
        ("three", [first, second], 3, 5000),
    ):
        run(inputs, tmp_path / name, options, workers, block_bytes)
        assert pair_bytes(tmp_path / f"{name}_text_document") == expected, name


@pytest.mark.parametrize("workers", [1, 2])
def test_the_cached_layout_holds_the_same_documents(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    path = write_numbered_lines(tmp_path / "in.jsonl", hard_documents(300))
    run([path], tmp_path / "mmap", EncodeOptions(choice, append_eod=True))
    run([path], tmp_path / "cached", EncodeOptions(choice, append_eod=True, is_cached=True), workers)
    mmap, cached = (IndexedDataset(tmp_path / f"{name}_text_document") for name in ("mmap", "cached"))
    assert cached.is_cached and cached.dtype == np.int32 and not mmap.is_cached
    assert [ids.tolist() for ids in cached[:]] == [ids.tolist() for ids in mmap[:]]
    assert cached.documents.tolist() == mmap.documents.tolist()


def test_several_keys_give_several_pairs(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": "one", "b": ""}\n{"a": "two", "b": "three"}\n')
    result = run([path], tmp_path / "out", EncodeOptions(choice, keys=("a", "b")), workers=2)
    assert result.prefixes == (f"{tmp_path}/out_a_document", f"{tmp_path}/out_b_document")
    assert [len(IndexedDataset(prefix)) for prefix in result.prefixes] == [2, 1]
    assert result.empty == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_nothing_is_published(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    path = write_numbered_lines(tmp_path / "in.jsonl", ["some text"] * 500)
    start = path.stat().st_size
    with path.open("ab") as stream:
        stream.write(b'{"text": 5}\n{"text": "after"}\nnot json\n')
    with pytest.raises(
        DataError, match=rf"in\.jsonl:501: byte offset {start}: key 'text' holds a JSON number.*--on-bad-line skip"
    ):
        run([path], tmp_path / "out", EncodeOptions(choice), workers)
    assert sorted(name.name for name in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_can_be_skipped_with_a_count(
    tmp_path: Path, choice: TokenizerChoice, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_numbered_lines(tmp_path / "in.jsonl", ["some text"] * 500)
    with path.open("ab") as stream:
        stream.write(b'{"text": 5}\n{"text": "after"}\n' + b"\xff\n" * 300)
    result = run([path], tmp_path / "out", EncodeOptions(choice, skip_bad_lines=True), workers)
    assert (result.documents, result.skipped) == (501, 301)
    shown = capsys.readouterr().err
    assert "in.jsonl:501: byte offset" in shown and "in.jsonl:503:" in shown and shown.count("skipped") < 20


@pytest.mark.parametrize("workers", [1, 2])
def test_line_numbers_start_again_in_each_file(tmp_path: Path, choice: TokenizerChoice, workers: int) -> None:
    first = write_numbered_lines(tmp_path / "1.jsonl", ["some text"] * 300)
    second = tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(first.read_bytes() + b"[]\n"))
    with pytest.raises(DataError, match=r"2\.jsonl\.gz:301: byte offset \d+: the line holds a JSON array"):
        run([first, second], tmp_path / "out", EncodeOptions(choice), workers)


def test_an_input_without_documents_gives_an_empty_pair(tmp_path: Path, choice: TokenizerChoice) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": ""}\n')
    result = run([tmp_path / "in.jsonl"], tmp_path / "out", EncodeOptions(choice, append_eod=True))
    assert (result.documents, result.empty, result.tokens) == (0, 1, 0)
    assert Path(f"{tmp_path}/out_text_document.bin").stat().st_size == 0

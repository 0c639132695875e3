"""Windows hold every token of every document, and give the documents back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import tokenizers.processors

from megatron.data.formats.index_layout import CODE_OF_DTYPE
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.parquet_windows import WindowFile
from megatron.data.formats.sidecar import read_sidecar
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.featurize.small_windows import RECORD, small
from tests.trident.corpus.preprocess_runs import quiet, write_lines
from trident.corpus.featurize.featurize_corpus import WindowOptions, featurize, featurize_tokens
from trident.corpus.featurize.windows_to_tokens import windows_to_tokens
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess

pytest.importorskip("pyarrow.parquet")


def test_texts_become_the_same_shards_for_any_workers_and_give_the_documents_back(
    tmp_path: Path, choice: TokenizerChoice
) -> None:
    texts = hard_documents(400)
    source = write_lines(tmp_path / "in.jsonl", texts)
    options = small(num_shards=3)
    one = featurize([source], f"{tmp_path}/one", EncodeOptions(choice), options, 1, quiet())
    two = featurize([source], f"{tmp_path}/two", EncodeOptions(choice), options, 2, quiet(), block_bytes=3000)
    assert one.tally == two.tally and len(one.shards) == 3
    for first, second in zip(one.shards, two.shards, strict=True):
        assert Path(first).read_bytes() == Path(second).read_bytes()
    assert max(WindowFile(path).rows for path in one.shards) - min(WindowFile(path).rows for path in one.shards) <= 1
    tokenizer = build_tokenizer(choice)
    expected = [tokenizer.encode(text) for text in texts if text]
    assert one.tally.tokens == one.tally.kept == sum(map(len, expected)) and one.empty == len(texts) - len(expected)
    windows_to_tokens([f"{tmp_path}/two"], f"{tmp_path}/back")
    back = IndexedDataset(f"{tmp_path}/back")
    assert [back[number].tolist() for number in range(len(back))] == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert any(0 in tokens for tokens in expected)  # token 0 is a token like others


def test_the_rows_of_one_document_by_hand(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "in", np.uint16) as writer:
        writer.add_document([[0, 1, 2], [3, 4, 5]])
        writer.add_document([[0]])
    options = WindowOptions(3, 6, 2, -7, 3, mask_overlap=True, bos_id=20, eos_id=21, pad_id=0)
    result = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/out", RECORD, options, 1)
    rows = next(WindowFile(result.shards[0]).batches(1000, group=0))
    assert rows.input_ids.tolist() == [[20, 0, 1, 2, 3, 21], [20, 3, 4, 5, 21, 0], [20, 0, 21, 0, 0, 0]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert rows.labels.tolist() == [[20, 0, 1, 2, 3, 21], [20, -7, 4, 5, 21, -7], [20, 0, 21, -7, -7, -7]]
    assert list(result.report(6)) == [
        "Read 2 documents with 7 tokens; 0 empty documents and 0 bad lines skipped.",
        "Wrote 3 windows of 6 positions: 7 tokens, 1 of them a second time (overlap), 6 beginnings and ends, "
        "4 padding.",
        "Dropped 0 tokens; 0 windows were below --min-sequence-length, all kept and padded.",
        f"Shards: {tmp_path}/out-00000-of-00001.",
    ]
    dropping = WindowOptions(4, 6, 2, -7, 3, drop_short=True, bos_id=20, eos_id=21)
    assert "Dropped 1 tokens; 1 windows were below --min-sequence-length, 1 dropped (--drop-short)." in list(
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/out", RECORD, dropping, 1).report(6)
    )


def test_an_end_of_document_is_removed_and_restored(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_lines(tmp_path / "in.jsonl", hard_documents(60))
    preprocess([source], f"{tmp_path}/in", EncodeOptions(choice, append_eod=True), 1, quiet())
    result = featurize_tokens(f"{tmp_path}/in_text_document", f"{tmp_path}/w", None, small(), 1)
    eod = build_tokenizer(choice).eod_id
    for windows in WindowFile(result.shards[0]).batches(1000):
        inside = windows.input_ids[:, 1:-1][windows.attention_mask[:, 2:] == 1]
        assert not (inside == eod).any()
    windows_to_tokens([f"{tmp_path}/w*"], f"{tmp_path}/out")
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"out.{suffix}").read_bytes() == (tmp_path / f"in_text_document.{suffix}").read_bytes()
    sidecar, before = read_sidecar(tmp_path / "out"), read_sidecar(tmp_path / "in_text_document")
    assert sidecar is not None and before is not None and sidecar.tokenizer == before.tokenizer and sidecar.append_eod
    assert [source.path for source in sidecar.sources] == list(result.shards)
    with IndexedWriter(tmp_path / "in_text_document", np.uint16) as writer:
        writer.add_document([[1, eod]])
        writer.add_document([[2, 3]])
        writer.describe(before.tokenizer, before.versions, before.sources, append_eod=True, empty=0)
    with pytest.raises(DataError, match=f"document 1 ends with the id 3, expected {eod} by.*--append-eod"):
        featurize_tokens(f"{tmp_path}/in_text_document", f"{tmp_path}/w", None, small(), 1)


@pytest.mark.parametrize(
    ("template", "begin", "end"), [("<s> $A </s>", True, True), ("<s> $A", True, False), ("<s> <s> $A", False, False)]
)
def test_special_tokens_around_a_text_appear_once_in_a_window(
    tmp_path: Path, template: str, begin: bool, end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with Llama's tokenizers, whose ids of a text begin with <s>."""
    added = [tokenizers.AddedToken("<s>", special=True), tokenizers.AddedToken("</s>", special=True)]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(hard_documents(50), vocab_size=400, show_progress=False)
    tokenizer.add_special_tokens(added)
    numbers = {token: tokenizer.token_to_id(token) for token in ("<s>", "</s>")}
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=list(numbers.items())
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    encoding = EncodeOptions(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path)))
    texts = [*hard_documents(40), "<s></s>"]
    source = write_lines(tmp_path / "in.jsonl", texts)
    result = featurize([source], f"{tmp_path}/w", encoding, small(), 1, quiet())
    facts = WindowFile(result.shards[0]).facts
    assert facts is not None and facts.eos_id == numbers["</s>"]
    assert (facts.document_begin == numbers["<s>"]) == begin and (facts.document_end == numbers["</s>"]) == end
    assert ("adds the ids" in capsys.readouterr().err) != begin
    first = next(WindowFile(result.shards[0]).batches(1000, group=0)).input_ids[0].tolist()
    whole = build_tokenizer(encoding.tokenizer)
    expected = [whole.encode(text) for text in texts]
    if begin:
        assert facts.bos_id == numbers["<s>"] and first[:3] == expected[0][:3]
    windows_to_tokens(result.shards, f"{tmp_path}/out")
    read = IndexedDataset(f"{tmp_path}/out")
    least = len(whole.encode(""))
    assert [read[number].tolist() for number in range(len(read))] == [
        tokens for tokens in expected if len(tokens) > (least if begin else 0)
    ]


def test_wide_ids_keep_their_width(tmp_path: Path) -> None:
    record = TokenizerRecord("large", None, 200000, 199999)
    with IndexedWriter(tmp_path / "in", np.int32) as writer:
        writer.add_document([[65536, 7], [199998] * 70])
        writer.add_document([[8, 9]])
    result = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", record, small(), 1)
    assert next(WindowFile(result.shards[0]).batches(1000, group=0)).input_ids.max() == 199999
    windows_to_tokens([f"{tmp_path}/w"], f"{tmp_path}/out")
    read = IndexedDataset(tmp_path / "out")
    assert read.dtype == np.int32 and [read[0].tolist(), read[1].tolist()] == [[65536, 7, *[199998] * 70], [8, 9]]


@pytest.mark.parametrize(
    ("changed", "record", "text"),
    [
        ({"max_sequence_length": 2, "min_sequence_length": 1}, RECORD, "--max-sequence-length 2 leaves no room"),
        ({"stride": 31}, RECORD, "--stride 31 would skip tokens: a window holds 30"),
        ({"min_sequence_length": 33}, RECORD, "--min-sequence-length 33 is above --max-sequence-length 32"),
        ({"ignore_label": 0}, RECORD, "--ignore-label 0 is a token id"),
        ({}, None, "--eos-id is unknown.*--bos-id is unknown|--eos-id is unknown"),
        ({"num_special_token_reserved": 1}, TokenizerRecord("no end", None, 9, None), "--eos-id is unknown"),
        ({"pad_id": 600}, RECORD, "--pad-id 600 is not in the vocabulary, whose ids are 0 to 599"),
        ({"bos_id": -1}, None, "--bos-id -1 is not in the vocabulary, whose ids are 0 to 2147483647"),
    ],
)
def test_contradicting_options_are_a_one_sentence_error(
    tmp_path: Path, changed: dict[str, Any], record: TokenizerRecord | None, text: str
) -> None:
    with IndexedWriter(tmp_path / "in", np.uint16) as writer:
        writer.add_document([[1]])
    with pytest.raises(ConfigError, match=text):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", record, small(**changed), 1)


def test_pairs_without_ids_are_rejected(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "in", np.int32) as writer:
        writer.add_document([[1, -5]])
    with pytest.raises(DataError, match="in holds the id -5 in documents 0 to 0; ids must not be negative"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    with IndexedWriter(tmp_path / "in", np.int64) as writer:
        writer.add_document([[1, 5]])
    index = bytearray((tmp_path / "in.idx").read_bytes())
    index[17] = CODE_OF_DTYPE[np.dtype("<f8")]
    (tmp_path / "in.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"in\.bin holds float64, but windows require token ids"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.bin", "in.idx"]


def test_unwritable_outputs_are_reported_before_the_work(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Cannot write .*file/w"):
        featurize([source], f"{tmp_path}/file/w", EncodeOptions(choice), small(), 1, quiet())
    with pytest.raises(ConfigError, match="--output-path .*/out/ is a folder.*out/train for .*/out/train-00000-of-0"):
        featurize([source], f"{tmp_path}/out/", EncodeOptions(choice), small(), 1, quiet())
    with pytest.raises(ConfigError, match="--input none.jsonl cannot be read"):
        featurize(["none.jsonl"], f"{tmp_path}/w", EncodeOptions(choice), small(), 1, quiet())


def test_a_text_without_documents_gives_one_empty_shard(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["", ""])
    result = featurize([source], f"{tmp_path}/w", EncodeOptions(choice), small(), 1, quiet())
    assert result.empty == 2 and result.tally.windows == 0 and WindowFile(result.shards[0]).rows == 0
    assert windows_to_tokens(result.shards, f"{tmp_path}/out").documents == 0

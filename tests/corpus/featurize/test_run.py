"""Windows hold every token of every document, and give the documents back."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import tokenizers.processors
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.corpus.featurize import back as featurize_back
from megatron.corpus.featurize import shards as featurize_shards
from megatron.corpus.featurize.back import windows_to_tokens
from megatron.corpus.featurize.run import WindowOptions, featurize, featurize_tokens
from megatron.corpus.featurize.windows import Cutting, Documents, cut, tally, window_counts
from megatron.corpus.preprocess.encode import EncodeOptions
from megatron.corpus.preprocess.run import preprocess
from megatron.corpus.workers.processes import WorkerError
from megatron.corpus.workers.progress import ProgressLine
from megatron.data.formats.atomic_files import temporary_beside
from megatron.data.formats.indexed import IndexedDataset, IndexedWriter
from megatron.data.formats.sidecar import read_sidecar
from megatron.data.formats.token_index import CODE_OF_DTYPE
from megatron.data.formats.windows import WindowFacts, WindowFile
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents, write_vocabulary

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pytest.importorskip("pyarrow.parquet")


RECORD = TokenizerRecord("tiny", "abc", 600, 599)


@st.composite
def cuttings(draw: Any) -> Cutting:
    special = draw(st.integers(0, 2))
    length = draw(st.integers(special + 1, 12))
    stride = draw(st.integers(1, length - special))
    facts = WindowFacts(
        length, special, stride, -100, 9, 8, draw(st.sampled_from([0, 8])), mask_overlap=draw(st.booleans())
    )
    return Cutting(facts, draw(st.integers(1, length)), draw(st.booleans()), draw(st.integers(1, 60)))


def numbered(lengths: Sequence[int]) -> Documents:
    """Documents of ids that differ everywhere, 0 among them."""
    numbers = np.array(lengths, dtype=np.int64)
    tokens = np.arange(numbers.sum())
    return Documents(numbers, np.cumsum(numbers) - numbers, lambda start, stop: tokens[start:stop], "test")


@settings(max_examples=120, deadline=None)
@given(cuttings(), st.lists(st.integers(0, 40), max_size=6))
def test_every_token_of_every_document_appears(cutting: Cutting, lengths: list[int]) -> None:
    facts = cutting.facts
    found: list[dict[int, int]] = []
    learned: list[int] = []
    windows = repeated = padded = 0
    for rows, offsets in cut(cutting, numbered(lengths)):
        for ids, mask, labels, offset in zip(
            rows.input_ids.tolist(), rows.attention_mask.tolist(), rows.labels.tolist(), offsets.tolist(), strict=True
        ):
            used = int(sum(mask))
            assert mask == [1.0] * used + [0.0] * (facts.sequence_length - used)
            assert ids[used:] == [facts.pad_id] * (facts.sequence_length - used)
            assert labels[used:] == [-100] * (facts.sequence_length - used)
            assert ids[:1] == [9] or facts.special_tokens < 2
            if facts.special_tokens:
                assert ids[used - 1] == labels[used - 1] == 8
            body = slice(facts.before, used - (facts.special_tokens > 0))
            assert all(label in (token, -100) for token, label in zip(ids[body], labels[body], strict=True))
            assert facts.mask_overlap or labels[:used] == ids[:used]
            learned += [token for token, label in zip(ids[body], labels[body], strict=True) if label >= 0]
            if offset == 0:
                found.append({})
            for place, token in enumerate(ids[body], start=offset):
                assert found[-1].setdefault(place, token) == token
            windows += 1
            padded += facts.sequence_length - used
            repeated += len(ids[body])
    starts = np.cumsum(lengths) - lengths
    whole = {int(start): length for start, length in zip(starts, lengths, strict=True) if length}
    kept = 0
    for document in found:
        places = sorted(document)
        assert places == list(range(len(places)))
        tokens = [document[place] for place in places]
        length = whole.pop(tokens[0])
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert len(tokens) == length or cutting.drop_short
        kept += len(tokens)
    assert not whole or cutting.drop_short
    if facts.mask_overlap:
        assert len(learned) == len(set(learned)) == kept
    counted = tally(cutting, np.array(lengths, dtype=np.int64))
    assert (counted.documents, counted.tokens) == (sum(length > 0 for length in lengths), sum(lengths))
    assert (counted.windows, counted.kept, counted.padded) == (windows, kept, padded)
    assert (counted.repeated, counted.special) == (repeated - kept, windows * facts.special_tokens)
    assert counted.kept + counted.repeated + counted.special + counted.padded == windows * facts.sequence_length
    assert counted.windows == window_counts(cutting, np.array(lengths, dtype=np.int64)).sum()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 599), max_size=30), max_size=3), max_size=8),
    st.integers(3, 10),
    st.data(),
)
def test_tokens_to_windows_and_back_lose_nothing(documents: list[list[list[int]]], length: int, data: Any) -> None:
    special = data.draw(st.integers(0, 2))
    options = WindowOptions(
        min_sequence_length=1,
        max_sequence_length=length,
        num_special_token_reserved=special,
        stride=data.draw(st.one_of(st.none(), st.integers(1, length - special))),
        mask_overlap=data.draw(st.booleans()),
        num_shards=data.draw(st.integers(1, 4)),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(featurize_shards, "_DOCUMENTS_AT_ONCE", data.draw(st.integers(1, 4))),
        patch.object(featurize_back, "_POSITIONS_AT_ONCE", data.draw(st.integers(1, 40))),
        patch.object(Cutting, "rows_at_once", data.draw(st.integers(1, 5))),
    ):
        with IndexedWriter(f"{folder}/in", np.uint16) as writer:
            for document in documents:
                writer.add_document([np.array(sequence, np.uint16) for sequence in document])
        result = featurize_tokens(f"{folder}/in", f"{folder}/w", RECORD, options, 1)
        back = windows_to_tokens([f"{folder}/w"], f"{folder}/out")
        expected = [list(chain(*document)) for document in documents if any(document)]
        read = IndexedDataset(f"{folder}/out")
        assert [read[number].tolist() for number in range(len(read))] == expected
        assert result.tally.kept == back.tokens == read.tokens and back.windows == result.tally.windows
        assert sum(WindowFile(path).rows for path in result.shards) == result.tally.windows


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> TokenizerChoice:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def quiet() -> ProgressLine:
    return ProgressLine(None, 1, lambda text: None)


def small(**changed: Any) -> WindowOptions:
    return WindowOptions(**{"min_sequence_length": 8, "max_sequence_length": 32, "stride": 16, **changed})


def test_texts_become_the_same_shards_for_any_workers_and_give_the_documents_back(
    tmp_path: Path, choice: TokenizerChoice
) -> None:
    texts = hard_documents(400)
    source = write_jsonl(tmp_path / "in.jsonl", texts)
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
    rows = WindowFile(result.shards[0]).read(0)
    assert rows.input_ids.tolist() == [[20, 0, 1, 2, 3, 21], [20, 3, 4, 5, 21, 0], [20, 0, 21, 0, 0, 0]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert rows.labels.tolist() == [[20, 0, 1, 2, 3, 21], [20, -7, 4, 5, 21, -7], [20, 0, 21, -7, -7, -7]]
    assert list(result.report(6)) == [
        "Read 2 documents with 7 tokens; 0 empty documents and 0 bad lines left out.",
        "Wrote 3 windows of 6 positions: 7 tokens, 1 of them a second time (overlap), 6 beginnings and ends, "
        "4 padding.",
        "Dropped 0 tokens; 0 windows were below --min-sequence-length, all kept and padded.",
        f"Shards: {tmp_path}/out-00000-of-00001.",
    ]
    dropping = WindowOptions(4, 6, 2, -7, 3, drop_short=True, bos_id=20, eos_id=21)
    assert "Dropped 1 tokens; 1 windows were below --min-sequence-length, 1 left out (--drop-short)." in list(
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/out", RECORD, dropping, 1).report(6)
    )


def test_an_end_of_document_is_taken_off_and_put_back(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", hard_documents(60))
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
        writer.describe_with(before)
    with pytest.raises(DataError, match=f"document 1 ends with the id 3, not with {eod} as.*--append-eod"):
        featurize_tokens(f"{tmp_path}/in_text_document", f"{tmp_path}/w", None, small(), 1)


@pytest.mark.parametrize(
    ("template", "begin", "end"), [("<s> $A </s>", True, True), ("<s> $A", True, False), ("<s> <s> $A", False, False)]
)
def test_what_a_tokenizer_puts_around_a_text_stands_once_in_a_window(
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
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    result = featurize([source], f"{tmp_path}/w", encoding, small(), 1, quiet())
    facts = WindowFile(result.shards[0]).facts
    assert facts is not None and facts.eos_id == numbers["</s>"]
    assert (facts.document_begin == numbers["<s>"]) == begin and (facts.document_end == numbers["</s>"]) == end
    assert ("puts the ids" in capsys.readouterr().err) != begin
    first = WindowFile(result.shards[0]).read(0).input_ids[0].tolist()
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
    assert WindowFile(result.shards[0]).read(0).input_ids.max() == 199999
    windows_to_tokens([f"{tmp_path}/w"], f"{tmp_path}/out")
    read = IndexedDataset(tmp_path / "out")
    assert read.dtype == np.int32 and [read[0].tolist(), read[1].tolist()] == [[65536, 7, *[199998] * 70], [8, 9]]


def test_windows_of_other_tools_become_a_document_each(tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    columns = {"input_ids": [[5, 6, 0], [9, 0, 0]], "attention_mask": [[0, 1, 1], [0, 0, 0]], "labels": [[5, 6, 0]] * 2}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    result = windows_to_tokens([path], f"{tmp_path}/out", append_eod=True, tokenizer=RECORD)
    assert IndexedDataset(tmp_path / "out")[0].tolist() == [6, 0, 599]
    assert (result.documents, result.empty, result.whole) == (1, 1, False)
    windows_to_tokens([path], f"{tmp_path}/plain")
    assert IndexedDataset(tmp_path / "plain").dtype == np.int32 and read_sidecar(tmp_path / "plain") is None
    with pytest.raises(ConfigError, match=r"--append-eod: .*x\.parquet does not say which id ends a document"):
        windows_to_tokens([path], f"{tmp_path}/none", append_eod=True)
    with pytest.raises(DataError, match=r"row 0 has input_ids outside of 0 to 4: 5 at position 0"):
        windows_to_tokens([path], f"{tmp_path}/none", TokenizerRecord("few", None, 5, 4))
    assert not list(tmp_path.glob("*none*"))


@pytest.fixture
def shards(tmp_path: Path) -> tuple[str, ...]:
    """Three shards of one long document and a short one."""
    with IndexedWriter(tmp_path / "in", np.uint16) as writer:
        writer.add_document([np.arange(90)])
        writer.add_document([[5]])
    return featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=3), 1).shards


def test_windows_that_do_not_fit_together_are_refused(tmp_path: Path, shards: tuple[str, ...]) -> None:
    out = f"{tmp_path}/out"
    with pytest.raises(DataError, match=r"w-00001-of-00003: row 0 does not follow the window before it"):
        windows_to_tokens(shards[1:], out)
    with pytest.raises(DataError, match=r"w-00002-of-00003: row 0 does not follow the window before it"):
        windows_to_tokens([shards[0], shards[2]], out)
    table = pyarrow.parquet.read_table(shards[0])
    ids = table.column("input_ids").to_pylist()
    ids[1][3] = 77
    notes = pyarrow.parquet.read_metadata(shards[0]).metadata
    changed = table.set_column(0, "input_ids", pyarrow.array(ids, table.schema.field(0).type))
    pyarrow.parquet.write_table(changed.replace_schema_metadata(notes), f"{tmp_path}/changed")
    with pytest.raises(DataError, match="changed: row 1 holds other tokens than the window before it"):
        windows_to_tokens([f"{tmp_path}/changed"], out)
    masks = table.column("attention_mask").to_pylist()
    masks[1][3] = 0.0
    changed = table.set_column(1, "attention_mask", pyarrow.array(masks, table.schema.field(1).type))
    pyarrow.parquet.write_table(changed.replace_schema_metadata(notes), f"{tmp_path}/changed")
    with pytest.raises(DataError, match="changed: row 1 has a mask that is not tokens first, then padding"):
        windows_to_tokens([f"{tmp_path}/changed"], out)
    other = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/other", RECORD, small(stride=15), 1).shards
    with pytest.raises(DataError, match="were not cut in the same way"):
        windows_to_tokens([*shards, *other], out)
    with pytest.raises(
        DataError, match=r"made with another tokenizer \(tiny, 600 tokens\) than the one given \(few, 5"
    ):
        windows_to_tokens(shards, out, TokenizerRecord("few", None, 5, 4))
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("changed", "record", "text"),
    [
        ({"max_sequence_length": 2, "min_sequence_length": 1}, RECORD, "--max-sequence-length 2 leaves no room"),
        ({"stride": 31}, RECORD, "--stride 31 would skip tokens: a window holds 30"),
        ({"min_sequence_length": 33}, RECORD, "--min-sequence-length 33 is above --max-sequence-length 32"),
        ({"ignore_label": 0}, RECORD, "--ignore-label 0 is a token's id"),
        ({}, None, "--eos-id is not known.*--bos-id is not known|--eos-id is not known"),
        ({"num_special_token_reserved": 1}, TokenizerRecord("no end", None, 9, None), "--eos-id is not known"),
        ({"pad_id": 600}, RECORD, "--pad-id 600 is no id of the vocabulary, whose ids are 0 to 599"),
        ({"bos_id": -1}, None, "--bos-id -1 is no id of the vocabulary, whose ids are 0 to 2147483647"),
    ],
)
def test_options_that_contradict_are_one_sentence(
    tmp_path: Path, changed: dict[str, Any], record: TokenizerRecord | None, text: str
) -> None:
    with IndexedWriter(tmp_path / "in", np.uint16) as writer:
        writer.add_document([[1]])
    with pytest.raises(ConfigError, match=text):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", record, small(**changed), 1)


def test_pairs_that_hold_no_ids_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "in", np.int32) as writer:
        writer.add_document([[1, -5]])
    with pytest.raises(DataError, match="in holds the id -5 in documents 0 to 0; ids are not negative"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    with IndexedWriter(tmp_path / "in", np.int64) as writer:
        writer.add_document([[1, 5]])
    index = bytearray((tmp_path / "in.idx").read_bytes())
    index[17] = CODE_OF_DTYPE[np.dtype("<f8")]
    (tmp_path / "in.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"in\.bin holds float64, and windows are made of token ids only"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.bin", "in.idx"]


def test_older_shards_go_and_leftovers_of_killed_runs_too(
    tmp_path: Path, shards: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    process = multiprocessing.get_context("fork").Process(target=leave_something, args=(tmp_path,))
    process.start()
    process.join()
    assert len(list(tmp_path.glob(".w*"))) == 2
    (tmp_path / "w-notes").touch()
    again = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(), 1)
    assert sorted(tmp_path.glob("w-*")) == [Path(again.shards[0]), tmp_path / "w-notes"]
    assert not list(tmp_path.glob(".w*")) and capsys.readouterr().err.count("which a killed run had left") == 2


def leave_something(folder: Path) -> None:
    temporary_beside(folder / "w-00003-of-00009").touch()
    scratch = temporary_beside(folder / "w")
    scratch.mkdir()
    (scratch / "tokens.bin").touch()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def forked_with(**changes: object) -> AbstractContextManager[object]:
    """Makes processes inherit a changed module, also where a library's thread would have them started anew."""
    return patch.multiple(featurize_shards, start_method=lambda: "fork", **changes)


def test_a_killed_process_is_named_and_nothing_is_published(tmp_path: Path, shards: tuple[str, ...]) -> None:
    before = {path: Path(path).read_bytes() for path in shards}

    def die(plan: object, shard: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with forked_with(_write_shard=die), pytest.raises(WorkerError, match="was killed by signal 9"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=2), 2)
    assert {path: Path(path).read_bytes() for path in shards} == before and not list(tmp_path.glob(".*"))


def test_a_failure_in_a_process_is_the_users_sentence(tmp_path: Path, shards: tuple[str, ...]) -> None:
    def fail(plan: object, shard: object) -> None:
        raise StorageError("Cannot write x: No space left on device")

    with forked_with(_write_shard=fail), pytest.raises(StorageError, match="No space left"):
        featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=2), 2)
    assert len(list(tmp_path.glob("w-*"))) == len(shards)


def test_places_that_cannot_be_written_are_found_before_the_work(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Cannot write .*file/w"):
        featurize([source], f"{tmp_path}/file/w", EncodeOptions(choice), small(), 1, quiet())
    with pytest.raises(ConfigError, match="--output-path .*/out/ is a folder.*out/train gives .*/out/train-00000-of-0"):
        featurize([source], f"{tmp_path}/out/", EncodeOptions(choice), small(), 1, quiet())
    with pytest.raises(ConfigError, match="--input none.jsonl cannot be read"):
        featurize(["none.jsonl"], f"{tmp_path}/w", EncodeOptions(choice), small(), 1, quiet())


def test_a_text_without_documents_gives_one_empty_shard(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["", ""])
    result = featurize([source], f"{tmp_path}/w", EncodeOptions(choice), small(), 1, quiet())
    assert result.empty == 2 and result.tally.windows == 0 and WindowFile(result.shards[0]).rows == 0
    assert windows_to_tokens(result.shards, f"{tmp_path}/out").documents == 0

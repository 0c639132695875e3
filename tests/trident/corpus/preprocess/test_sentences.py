"""Texts to sentences, and sentences to sequences: nothing lost, and the same bytes however the work is divided."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.preprocess_runs import quiet, write_lines
from trident.corpus.preprocess import encode as encode_module
from trident.corpus.preprocess import sentences as sentences_module
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.merge import merge
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.preprocess.sentences import SentenceSplitter

TEXT = "Mr. Smith pays $3.50.  He says \u201cFine. I go.\u201d and goes!\nNext line.\n\nNew paragraph?\n"


def test_sentences_without_and_with_the_whitespace_between_them() -> None:
    assert SentenceSplitter().split(TEXT) == [
        "Mr. Smith pays $3.50.",
        "He says \u201cFine. I go.\u201d and goes!",
        "Next line.",
        "New paragraph?",
    ]
    assert SentenceSplitter(keep_newlines=True).split(TEXT) == [
        "Mr. Smith pays $3.50.  ",
        "He says \u201cFine. I go.\u201d and goes!\n",
        "Next line.\n\n",
        "New paragraph?\n",
    ]


def test_whitespace_alone_is_not_a_sentence_unless_it_is_kept() -> None:
    for text in ("", " ", "\n\n \n\n"):
        assert SentenceSplitter().split(text) == []
    assert SentenceSplitter(keep_newlines=True).split("") == []
    assert SentenceSplitter(keep_newlines=True).split("\n\n \n\n") == ["\n\n \n\n"]
    assert SentenceSplitter(keep_newlines=True).split("\n\n\nOne. Two.") == ["\n\n\nOne. ", "Two."]


def test_languages_have_their_own_rules_and_upstreams_names_work() -> None:
    text = "Das ist z.B. gut. Sagt Prof. Meier."
    assert SentenceSplitter("german").split(text) == SentenceSplitter("de").split(text)
    assert SentenceSplitter("de").split(text) == ["Das ist z.B. gut.", "Sagt Prof. Meier."]
    assert SentenceSplitter("hi").split("यह एक है। यह दो है।") == ["यह एक है।", "यह दो है।"]


@pytest.mark.parametrize("language", ["en", "ja", "tr"])
def test_kept_sentences_are_the_text_whatever_it_holds(language: str) -> None:
    drawn = random.Random(5)
    pieces = [*"XY.?!\n \t\x85\xa0\u2028\u3000\u200b)\"'", "Mr. ", "e\u0301", "漢字。", "\U0010ffff", "http://a.b/c. "]
    texts = ["".join(drawn.choices(pieces, k=40)) for _ in range(2000)]
    keeps, drops = SentenceSplitter(language, keep_newlines=True), SentenceSplitter(language)
    for text in [*texts, *hard_documents(200)]:
        kept = keeps.split(text)
        assert "".join(kept) == text and all(kept)
        assert "".join("".join(drops.split(text)).split()) == "".join(text.split())


class Stumbling:
    """A stand-in for the library that fails or returns given sentences."""

    def __init__(self, result: list[str] | None) -> None:
        self.result = result

    def segment(self, language: str, text: str) -> list[str]:
        if self.result is None:
            raise RuntimeError("end byte index 3 is not a char boundary")
        return self.result


def test_if_the_library_fails_lines_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences_module, "_library", lambda: Stumbling(None))
    assert SentenceSplitter().split("One. Two.\nThree.") == ["One. Two.", "Three."]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["One. ", "\n\n", "Four."], ["One. ", "Two. Three.\r\n\r\n", "Four."]),
        (["Two. ", "Three."], ["One. ", "Two. ", "Three.\r\n\r\n", "Four."]),
        (["Six. ", "Three.", "\n\n", "Four."], ["One. Two. ", "Three.\r\n\r\n", "Four."]),
        ([], ["One. Two. Three.\r\n\r\nFour."]),
    ],
)
def test_whitespace_dropped_by_the_library_is_restored(
    monkeypatch: pytest.MonkeyPatch, found: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(sentences_module, "_library", lambda: Stumbling(found))
    text = "One. Two. Three.\r\n\r\nFour."
    kept = SentenceSplitter(keep_newlines=True).split(text)
    assert "".join(kept) == text
    assert SentenceSplitter().split(text) == [piece.strip() for piece in expected]


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_long_texts_are_cut_at_paragraphs_and_give_the_same(
    tmp_path: Path, choice: TokenizerChoice, keep_newlines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    splitter = SentenceSplitter(keep_newlines=keep_newlines)
    texts = [" \n\n" + TEXT * 30, "\n\n\n", TEXT, "One.\n\nTwo.\r\n\r\nThree"]
    whole = [splitter.split(text) for text in texts]
    path = write_lines(tmp_path / "in.jsonl", texts)
    options = EncodeOptions(choice, append_eod=True, sentences=splitter)
    expected = run(path, tmp_path / "whole", options)
    monkeypatch.setattr(sentences_module, "_PART_LETTERS", 50)
    monkeypatch.setattr(encode_module, "_LETTERS_AT_ONCE", 100)
    assert len(list(splitter.batches(texts[0]))) > 10
    assert [splitter.split(text) for text in texts] == whole
    assert run(path, tmp_path / "parts", options) == expected


def test_source_code_is_not_split_into_lines() -> None:
    text = Path(random.__file__).read_text(encoding="utf-8")
    kept, dropped = SentenceSplitter(keep_newlines=True).split(text), SentenceSplitter().split(text)
    assert "".join(kept) == text and len(kept) == len(dropped) < text.count("\n") / 2


def test_a_wrong_language_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--lang en_US! is not a language\. Use an ISO 639 code like en"):
        SentenceSplitter("en_US!")
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ConfigError, match="--split-sentences requires the sentencex package: pip install"):
        SentenceSplitter()


def run(path: str, prefix: Path, options: EncodeOptions, workers: int = 1, block_bytes: int = 4096) -> list[bytes]:
    result = preprocess((path,), str(prefix), options, workers, quiet(), block_bytes)
    assert result.prefixes == (f"{prefix}_text_sentence",)
    return [Path(f"{prefix}_text_sentence.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("keep_newlines", [False, True])
def test_one_sequence_a_sentence_and_one_document_a_line(
    tmp_path: Path, choice: TokenizerChoice, append_eod: bool, keep_newlines: bool
) -> None:
    texts = [TEXT, "", "  \n ", "One sentence", *hard_documents(100), "Last. But one."]
    splitter = SentenceSplitter(keep_newlines=keep_newlines)
    options = EncodeOptions(choice, append_eod=append_eod, sentences=splitter)
    run(write_lines(tmp_path / "in.jsonl", texts), tmp_path / "out", options)
    tokenizer = build_tokenizer(choice)
    expected, ends = [], [0]
    for text in texts:
        rows = [ids for sentence in splitter.split(text) if (ids := tokenizer.encode(sentence))]
        if rows:
            rows[-1] = rows[-1] + [tokenizer.eod_id] * append_eod
            expected += rows
            ends.append(len(expected))
    data = IndexedDataset(tmp_path / "out_text_sentence")
    assert [ids.tolist() for ids in data[:]] == expected
    assert data.documents.tolist() == ends and data.dtype == np.uint16
    sidecar = read_sidecar(tmp_path / "out_text_sentence")
    assert sidecar is not None
    assert (sidecar.sequences, sidecar.documents) == (len(expected), len(ends) - 1)
    assert sidecar.empty == len(texts) - sidecar.documents
    assert sidecar.versions["sentencex"]


def test_workers_block_sizes_and_merged_chunks_give_the_same_bytes(tmp_path: Path, choice: TokenizerChoice) -> None:
    texts = [f"{text} And so on. The {number}th." for number, text in enumerate(hard_documents(500))]
    whole = write_lines(tmp_path / "in.jsonl", texts)
    options = EncodeOptions(choice, append_eod=True, sentences=SentenceSplitter(keep_newlines=True))
    expected = run(whole, tmp_path / "whole", options)
    assert run(whole, tmp_path / "two", options, workers=2) == expected
    assert run(whole, tmp_path / "big", options, block_bytes=1 << 30) == expected
    for number in range(3):
        run(write_lines(tmp_path / "part", texts[number * 200 : number * 200 + 200]), tmp_path / str(number), options)
    plan = merge([f"{tmp_path}/{number}_text_sentence" for number in range(3)], f"{tmp_path}/merged_text_sentence")
    assert [Path(f"{tmp_path}/merged_text_sentence.{suffix}").read_bytes() for suffix in ("bin", "idx")] == expected
    assert plan.index.documents == len(texts) < plan.index.sequences

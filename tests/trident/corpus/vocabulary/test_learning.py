"""Vocabularies: reproducible, with the requested special tokens, and texts that round-trip."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron.errors import ConfigError, DataError
from tests.trident.corpus.vocabulary.learned import SOURCE, learned, load
from trident.corpus.vocabulary.learning import (
    byte_level_files,
    drawn_texts,
    special_tokens,
    texts_of,
    train_byte_level,
)
from trident.corpus.vocabulary.unigram import train_unigram
from trident.corpus.vocabulary.wordpiece import train_wordpiece

SEED_ORDER = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")


@pytest.mark.parametrize(
    ("model_type", "kind", "suffix"),
    [
        ("bpe", "GPT2BPETokenizer", "-vocab.json"),
        ("unigram", "GPTSentencePieceTokenizer", ".model"),
        ("wordpiece", "BertWordPieceLowerCase", "-vocab.txt"),
    ],
)
def test_special_tokens_have_the_ids_of_the_original_project(
    tmp_path: Path, model_type: str, kind: str, suffix: str
) -> None:
    special = special_tokens(["dsgpt2"], None)
    assert special[:7] == SEED_ORDER and special[7:] == tuple(f"<unused{number}>" for number in range(100))
    files = learned(model_type, special=special)
    assert learned(model_type, special=special) == files
    described = Tokenizer.from_str(files["-tokenizer.json"].decode())
    own = load(tmp_path, files, kind, suffix)
    also = load(tmp_path, files, "HFTokenizer", "-tokenizer.json")
    for number, token in enumerate(special):
        assert described.token_to_id(token) == number
        assert also.encode(token) == [number] and number not in own.encode(f"a {token} b{token}")
    assert also.vocab_size == own.vocab_size == 900 + 2 * (model_type == "wordpiece")
    assert also.eod_id == 2 and own.eod_id == (901 if model_type == "wordpiece" else 2)
    if model_type == "unigram":
        assert own.decode([4]) == "<mask>"


def test_drawn_texts_are_a_fair_sample_in_order() -> None:
    texts = [str(number) for number in range(100)]
    assert drawn_texts(texts, 1000, 1) == texts
    one, again, other = (drawn_texts(iter(texts), 20, seed) for seed in (1, 1, 2))
    assert one == again != other and len(one) == 20 and one == sorted(one, key=int)
    counts = [0] * 100
    for seed in range(400):
        for text in drawn_texts(texts, 20, seed):
            counts[int(text)] += 1
    assert min(counts) > 45 and max(counts) < 115  # 80 each, with a deviation of 8


def test_texts_of_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n\ntwo\n\nthree")
    assert list(texts_of([str(path)], ["text"], 1.0, False, separator="\n\n")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("names", "unused", "message"),
    [
        (["<a>", "<a>"], None, r"lists '<a>' twice"),
        (["<unused0>"], 1, r"lists '<unused0>' twice"),
        (["hello"], None, r"'hello' could be learned as an ordinary word"),
        (["a b"], None, r"'a b' could be learned"),
        ([""], None, r"'' could be learned"),
        (["==="], None, r"'===' could be learned"),
    ],
)
def test_invalid_special_tokens(names: list[str], unused: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        special_tokens(names, unused)


def test_valid_special_tokens() -> None:
    assert special_tokens([], None) == () and special_tokens([], 2) == ("<unused0>", "<unused1>")
    assert special_tokens(["dsgpt2"], 1) == (*SEED_ORDER, "<unused0>")
    assert special_tokens(["[INST]", "<|im_end|>"], None) == ("[INST]", "<|im_end|>")


def test_byte_level_keeps_one_end_of_document() -> None:
    vocabulary, _ = train_byte_level(SOURCE, 300, special=["<pad>"])
    assert vocabulary["<pad>"] == 0 and vocabulary["<|endoftext|>"] == 299
    vocabulary, _ = train_byte_level(SOURCE, 300, special=["<|endoftext|>", "<pad>"])
    assert vocabulary["<|endoftext|>"] == 0 and len(vocabulary) == 300
    assert len(train_byte_level([], 257)[0]) == 257
    files = byte_level_files(vocabulary, [], ["<|endoftext|>"])
    assert json.loads(files["-tokenizer.json"])["added_tokens"][0]["content"] == "<|endoftext|>"


def test_untrainable_inputs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"--vocab-size 262 is too small: 256 bytes and 7 special tokens \(<s>, <pad>.*need 263"
    ):
        train_byte_level(SOURCE, 262, special=SEED_ORDER)
    with pytest.raises(DataError, match="has no text to learn from"):
        train_unigram(["", "\n \n"], 900)
    with pytest.raises(ConfigError, match="--vocab-size 100 with 3 special tokens does not work for this text"):
        train_unigram(SOURCE, 100)
    with pytest.raises(DataError, match="has no text to learn from"):
        train_wordpiece(lambda: ["", " "], 900)
    with pytest.raises(ConfigError, match=r"--vocab-size 8 is too small: 5 special tokens, 2 letters and 2 .* need 9"):
        train_wordpiece(lambda: ["abab"], 8)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match="--model-type unigram requires the sentencepiece package"):
        train_unigram(SOURCE, 900)

"""BERT's WordPiece: the ids of BERT's own rules, and upstream's two tokens after the vocabulary."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import DataError
from megatron.tokenizers import wordpiece as module
from megatron.tokenizers.encoders.fast_encoder import edge_cases
from megatron.tokenizers.encoders.long_text import LongText
from megatron.tokenizers.library import RustReference
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789éüßσ漢字"
VOCABULARY = [
    *SPECIAL, *LETTERS, *("##" + letter for letter in LETTERS), *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "the", "##ing", "a" * 7, "##ll", "str", "##asse", "A", "B", "It", "##'",
]  # fmt: skip


def load(path: Path, kind: str) -> Tokenizer:
    return build_tokenizer(TokenizerChoice(kind, vocab_file=str(path)))


def write(folder: Path, lines: list[str] = VOCABULARY) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def bert_words(text: str, lower_case: bool) -> list[str]:
    """BERT's cutting into words, by the letter: what is a control, a blank, an ideograph, a punctuation mark."""
    spaced = ""
    for letter in text:
        category = unicodedata.category(letter)
        if letter in "\t\n\r" or category == "Zs":
            spaced += " "
        elif letter in "\0\ufffd" or category in ("Cc", "Cf"):
            continue
        elif 0x4E00 <= ord(letter) <= 0x9FFF:
            spaced += f" {letter} "
        else:
            spaced += letter
    words = []
    for word in spaced.split():
        if lower_case:
            parts = unicodedata.normalize("NFD", word.lower())
            word = "".join(part for part in parts if unicodedata.category(part) != "Mn")
        start = True
        for letter in word:
            mark = unicodedata.category(letter).startswith("P") or letter in "$+<=>^`|~"
            if mark or start:
                words.append(letter)
            else:
                words[-1] += letter
            start = mark
    return words


def bert_ids(text: str, lower_case: bool) -> list[int]:
    """BERT's greedy longest piece first."""
    ids = []
    for word in bert_words(text, lower_case):
        pieces: list[int] = []
        start = 0
        while start < len(word) <= 200:
            ends = range(len(word), start, -1)
            names = (("##" if start else "") + word[start:end] for end in ends)
            found = next(((name, end) for name, end in zip(names, ends, strict=True) if name in VOCABULARY), None)
            if found is None:
                break
            pieces.append(VOCABULARY.index(found[0]))
            start = found[1]
        ids += pieces if start == len(word) else [1]
    return ids


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_ids_are_those_of_berts_rules(tmp_path: Path, kind: str) -> None:
    tokenizer = load(write(tmp_path), kind)
    assert tokenizer.library == "tokenizers"
    texts = [
        "The AAAAAAA strings, it's Straße! [SEP] [MASK] ##ing",
        "a" * 200 + " " + "a" * 201,
        "x\u0000y\ufffdz \u00adq",
        *(text for text in hard_documents(300) if len(text) < 1000),
        *(text for text in edge_cases(())[:30] if len(text) < 1000 and "ς" not in text),
    ]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == bert_ids(text, kind == "BertWordPieceLowerCase"), repr(text[:80])


def test_known_words_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WORDS", 50)
    tokenizer = load(write(tmp_path), "BertWordPieceLowerCase")
    plain = RustReference(module.wordpiece({name: place for place, name in enumerate(VOCABULARY)}, True))
    letters = [chr(point) for point in range(0x3100) if not 0xD800 <= point < 0xE000]
    texts = [*hard_documents(500), "".join(letters), " ".join(letters), "a\x1cb\x85c", "the " * 1000, "the" * 1000]
    for left, right in zip(tokenizer.encode_flat(texts * 2), plain.encode_flat(texts * 2), strict=True):
        assert left.tolist() == right.tolist() and left.dtype == right.dtype
    assert tokenizer.encode_flat([])[0].tolist() == []
    whole = " \u0301".join(texts)
    pieces = list(LongText(bytearray(whole.encode())).chunks(60))
    assert tokenizer.can_cut_before_spaces and len(pieces) > 300
    assert np.concatenate(tokenizer.encode_batch(pieces)).tolist() == tokenizer.encode(whole)


def test_upstreams_tokens_after_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path)
    tokenizer = load(path, "BertWordPieceLowerCase")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (len(VOCABULARY) + 2, len(VOCABULARY) + 1)
    assert tokenizer.unknown_id == 1 and tokenizer.encode("☺ a") == [1, VOCABULARY.index("a")]
    assert tokenizer.decode([*tokenizer.encode("the string"), tokenizer.eod_id]) == "the string [EOS]"
    assert tokenizer.fingerprint != load(path, "BertWordPieceCase").fingerprint
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").rstrip())
    assert load(path, "BertWordPieceLowerCase").fingerprint == tokenizer.fingerprint
    own = load(write(tmp_path, ["[UNK]", "[EOS]", "[BOS]"]), "BertWordPieceCase")
    assert (own.vocab_size, own.eod_id) == (3, 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[UNK]", "a", "b", "a"], r"vocab.txt:4 \(--vocab-file\) repeats 'a' of line 2"),
        (["[UNK]", "", "b"], r"vocab.txt:2 \(--vocab-file\) is empty"),
        (["a", "b"], r"vocab.txt \(--vocab-file\) has no \[UNK\] among its 2 lines"),
    ],
)
def test_damaged_vocabularies_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, lines), "BertWordPieceCase")

"""Scenario 001.2: a Turkish corpus and its vocabulary, in which no letter is lost or taken for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.seeds.turkish_gpt2.guide import DOCUMENTS, Guide
from tools.corpus import build_demo_corpus

pytestmark = [pytest.mark.xdist_group("turkish"), pytest.mark.slow]

PAIRS = (("I", "ı"), ("İ", "i"), ("I", "İ"), ("ı", "i"), ("IĞDIR", "iğdir"), ("ş", "s"), ("ğ", "g"))


def test_001_2_corpus_and_tokenizer_keep_every_letter(turkish: Guide) -> None:
    texts = turkish.texts()
    assert len(set(texts)) == DOCUMENTS and set("ıİIiğşçöüŞÇÖÜ") < set("".join(texts))
    files = turkish.folder / "gpt2-vocab.json", turkish.folder / "gpt2-merges.txt"
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    assert tokenizer.vocab_size == 700
    for text in (*texts, "ILIK İĞDE, ılık iğde: Iğdır, İĞDİR", *(letter for pair in PAIRS for letter in pair)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.encode(one) != tokenizer.encode(other) for one, other in PAIRS)
    assert "'ILIK İĞDE, ılık iğde'\n" in turkish.output
    assert f"round trip: {DOCUMENTS} of {DOCUMENTS} documents come back byte for byte" in turkish.output


def test_a_tokenizer_of_lower_case_merges_both_letters_i_as_the_page_says(tmp_path: Path) -> None:
    letters = "abcdefghijklmnoprstuvyzçğıöşüİIĞDR"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    lower, case = (
        build_tokenizer(TokenizerChoice(name, str(tmp_path / "vocab.txt")))
        for name in ("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    assert lower.encode("IĞDIR") == lower.encode("iğdir") == lower.encode("igdir")
    assert case.encode("IĞDIR") != case.encode("iğdir") != case.encode("igdir")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--lang", "tr", "--megabytes", "20"], "--megabytes 20.0 has no effect with --lang tr"),
        (["--questions", "q.jsonl"], "--questions q.jsonl has no effect with --lang python"),
        (["--seed", "0"], "--seed 0 has no effect with --lang python"),
    ],
)
def test_flags_of_the_other_corpus_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_demo_corpus.main(["--output", "demo.jsonl", *flags])

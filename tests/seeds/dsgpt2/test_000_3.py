"""Scenario 000.3: a vocabulary from the database, with dsGPT2's special tokens first and no text lost."""

from __future__ import annotations

import json
import re

import pytest

from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.seeds.dsgpt2.example import dsgpt2_example

pytestmark = pytest.mark.xdist_group("dsGPT2 scenarios")

FIRST = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")
TEXTS = ("안녕하세요, 세상아!", "İstanbul'da çığ, Iğdır'da ışık", "👍🏽 🇹🇷 👩‍👩‍👧", "tab\tand\r\nlines", "Ａé½")


def test_000_3_vocabulary_from_the_store() -> None:
    run = dsgpt2_example()
    drawn = sorted(path.name for path in (run.folder / "vocab").glob("text*.txt"))
    assert drawn == ["text0.txt", "text1.txt"]  # one a process
    folder = run.folder / "vocab" / "vocab_500"
    files = folder / "demo-vocab.json", folder / "demo-merges.txt"
    vocabulary = json.loads(files[0].read_text())
    unused = [f"<unused{number}>" for number in range(100)]
    assert [vocabulary[token] for token in (*FIRST, *unused)] == list(range(107))
    assert len(vocabulary) == 500
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode_flat([text])[0].tolist()).encode() == text.encode()
    said = run.output_of("3_vocabulary")
    assert "round trip: 2 of 2 documents come back byte for byte" in said
    assert re.search(r"^speed: [\d,]+ lines/s", said, flags=re.MULTILINE)

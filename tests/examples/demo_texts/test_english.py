"""What of a Python installation is English prose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo_texts import english
from megatron.errors import DataError

SENTENCE = "This is a sentence of the kind that documentation is made of, and it ends here."


def test_sentences_are_kept_and_code_is_not() -> None:
    code = "Name, other_name, third(x=1) -> [4, 5, 6] | {7: 8} and a few more of these (a_1, b_2, c_3)."
    first, second = SENTENCE.split(" of ")
    parts = [SENTENCE, ">>> f(1)", f"* {first} of\n  {second}", code, "Short.", SENTENCE.replace("here.", "here::")]
    assert list(english.paragraphs("\n\n".join(parts))) == [SENTENCE, SENTENCE]


def test_each_paragraph_comes_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = [("stdlib/a", f"{SENTENCE}\n\n{SENTENCE}"), ("stdlib/b", SENTENCE), ("stdlib/c", f"Other. {SENTENCE}")]
    monkeypatch.setattr(english, "_texts", lambda: iter(texts))
    monkeypatch.setattr(english, "LEAST_BYTES", 10)
    assert list(english.prose_documents()) == [("stdlib/a", SENTENCE), ("stdlib/c", f"Other. {SENTENCE}")]
    written = english.write_prose(tmp_path / "new" / "prose.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "new" / "prose.jsonl").read_text().splitlines()]
    assert written.documents == 2 and [line["src"] for line in lines] == ["stdlib/a", "stdlib/c"]


def test_too_little_english_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(english, "_texts", lambda: iter([("stdlib/a", SENTENCE)]))
    with pytest.raises(
        DataError, match=r"Only \d+ bytes of English are in the standard library of this Python; 500000 are needed"
    ):
        english.write_prose(tmp_path / "prose.jsonl")
    assert not (tmp_path / "prose.jsonl").exists()

"""The files of each kind of tokenizer are looked at, without the libraries that read them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.config.parse import read_flags
from megatron.train.preflight.inputs import tokenizer_failures


def said(*words: str) -> list[str]:
    reading = read_flags(words)
    return [str(failure) for failure in tokenizer_failures(reading.unchecked(), reading.wrong)]


def test_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("vocab.json", '{"a": 0}'), ("merges.txt", ""), ("vocab.txt", "[PAD]\n"), ("x.model", "\n\x0e")):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert said("--vocab-file", "vocab.json", "--merge-file", "merges.txt") == []
    assert len(said("--vocab-file", "vocab.txt", "--merge-file", "none")) == 2
    assert said("--tokenizer-type", "BertWordPieceCase", "--vocab-file", "vocab.txt") == []
    assert said("--tokenizer-type", "BertWordPieceCase", "--vocab-file", "none")[0].startswith(
        "--vocab-file none is not"
    )
    assert said("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "x.model") == []
    assert said("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "no.model")[0].startswith(
        "--tokenizer-model no"
    )
    assert said("--tokenizer-type", "Lama", "--vocab-file", "none") == [], "the type is refused"
    assert said("--vocab-file", "vocab.json") == [], "the other file is asked for"


def test_a_hugging_face_tokenizer_is_here_or_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ("--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path")
    (tmp_path / "tokenizer.json").write_text("not JSON")
    assert said(*kind, str(tmp_path))[0].startswith(
        f"{tmp_path}/tokenizer.json (tokenizer.json) begins with 'not JSON'"
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    assert said(*kind, str(tmp_path)) == []
    assert "is neither a local file or folder nor a Hub name" in said(*kind, f"{tmp_path}/none")[0]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "the package huggingface_hub, which can download it, is not installed" in said(*kind, "openai/gpt")[0]


def test_a_tokenizer_in_a_folder_that_this_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    (text,) = said("--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path", f"{tmp_path}/closed")
    assert text.startswith(f"the tokenizer {tmp_path}/closed cannot be read: Permission denied. Use one that this user")

"""The sources of the data are checked as far as the flags can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.parse import read_flags
from megatron.train.preflight.inputs import source_failures


def said(*words: str) -> list[str]:
    reading = read_flags(words)
    return [str(failure) for failure in source_failures(reading.unchecked(), reading.wrong)]


def test_all_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = said("--train-data-path", "a", "--valid-data-path", "1", "b", "2", "c.jsonl")
    assert [name for name in ("a.idx", "b.idx", "c.jsonl") if name in text] == ["a.idx", "b.idx", "c.jsonl"]
    assert said("--data-path", "1", "a", "b") == [], "a blend that cannot be read is refused as a flag"
    assert said("--data-path", "a", "--objective", "telepathic") == []


def test_a_template_counts_where_examples_are_trained_on(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "a", "answer": "b"}\n')
    (text,) = said("--data-path", str(chat), "--chat-template", "nothing")
    assert text.startswith("--chat-template nothing is neither plain, chatml")
    assert said("--data-path", str(chat), "--chat-template", "chatml") == []
    (text,) = said("--data-path", f"{tmp_path}/none", "--chat-template", "nothing")
    assert "chat-template" not in text


def test_a_folder_that_this_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    (text,) = said("--data-path", f"{tmp_path}/corpus")
    assert text.startswith(
        f"{tmp_path}/corpus cannot be read: Permission denied ({tmp_path}/corpus.idx). Check the permissions."
    )

"""Files, folders, packages and sources that a run names are checked, and nothing is made or imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron import log
from megatron.config.parse import read_flags
from megatron.train.preflight import inputs
from megatron.train.preflight.inputs import (
    file_failures,
    is_installed,
    package_failures,
    place_failures,
    source_failures,
    tokenizer_failures,
    unwritable_reason,
)


def refused(*words: str) -> list[str]:
    return [str(failure) for failure in file_failures(read_flags(words).unchecked())]


def test_a_checkpoint_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, file, full = tmp_path / "empty", tmp_path / "file", tmp_path / "full"
    (full / "iter_0000004").mkdir(parents=True)
    empty.mkdir()
    file.touch()
    reasons = {flag: f"{flag} needs its weights" for flag in ("--finetune", "--eval-only")}
    reasons["--exit-on-missing-checkpoint"] = "--exit-on-missing-checkpoint is set"
    for flag, reason in reasons.items():
        (missing,) = refused("--load", f"{tmp_path}/a/b", flag)
        assert missing.startswith(f"--load {tmp_path}/a/b has no checkpoint, but {reason}: it does not exist (the near")
        assert f"nearest existing folder is {tmp_path}). " in missing
        assert f"{reason}: it is empty. " in refused("--load", str(empty), flag)[0]
        assert f"{reason}: it cannot be listed (Not a directory). " in refused("--load", str(file), flag)[0]
        assert refused("--load", str(full), flag) == []
        assert refused("--load", str(empty), flag, "--save-secondary", str(full)) == [], "copies may be there"
    assert (
        "--ckpt-step 4 selects one of its steps" in refused("--load", f"{tmp_path}/a", "--load-tag", "iter_0000004")[0]
    )
    assert refused("--load", f"{tmp_path}/a") == []
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    assert refused("--load", f"{tmp_path}/a", "--finetune") == []


def test_a_file_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").touch()
    assert refused("--eval-tasks", f"{tmp_path}/tasks.yaml") == []
    assert refused("--eval-tasks", f"{tmp_path}/none.yaml") == [
        f"--eval-tasks {tmp_path}/none.yaml is not a file. Use a YAML or JSON file of tasks."
    ]


def test_a_teacher_is_looked_for_unless_its_time_may_be_over(tmp_path: Path) -> None:
    def sentences(more: str) -> list[str]:
        return refused("--load-teacher", f"{tmp_path}/t", *more.split())

    (missing,) = sentences("--kd")
    assert missing.startswith(f"--load-teacher {tmp_path}/t has no checkpoint, but --kd needs its weights: it does")
    assert missing.endswith("Use the checkpoint folder of the teacher's run.")
    assert len(sentences("--mos")) == 1 and sentences("--mos --kd-iters 5") == []
    (tmp_path / "t").mkdir()
    assert "has no checkpoint, but --mos needs its weights: it is empty" in sentences("--mos")[0]
    (tmp_path / "t" / "latest").write_text("")
    assert sentences("--kd") == []


PACKAGE_FLAGS = ["--wandb-project", "demo", "--tensorboard-dir", "events", "--tokenizer-type", "Llama2Tokenizer"]


def test_packages_that_are_missing_are_named_with_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "sentencepiece", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    request = read_flags(PACKAGE_FLAGS).unchecked()
    assert [str(failure) for failure in package_failures(request, ())] == [
        f"{flag} requires the package {package}, which is not installed. Install it with: pip install {package}"
        for flag, package in (
            ("--tensorboard-dir events", "tensorboard"),
            ("--wandb-project demo", "wandb"),
            ("--tokenizer-type Llama2Tokenizer", "sentencepiece"),
        )
    ]
    assert len(list(package_failures(request, {"tokenizer_type"}))) == 2
    assert list(package_failures(read_flags([]).unchecked(), ())) == []


def test_a_package_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_that_must_not_run.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("package_that_must_not_run")
    assert not is_installed("package_that_is_not_there")
    assert is_installed("sys")


def test_a_folder_that_is_there_or_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "away").symlink_to(tmp_path / "gone")
    (tmp_path / "here").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", tmp_path / "here" / "c"):
        assert unwritable_reason(folder) == ""
    assert unwritable_reason(tmp_path / "file") == f"{tmp_path}/file is not a folder"
    assert unwritable_reason(tmp_path / "file" / "a" / "b") == f"{tmp_path}/file is not a folder"
    assert unwritable_reason(tmp_path / "away" / "a") == f"{tmp_path}/away is a dangling link"
    assert unwritable_reason(tmp_path / "{run}" / "file") == "", "the name is not known yet"
    monkeypatch.setattr(inputs.os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    assert unwritable_reason(tmp_path / "a") == f"this user may not write in {tmp_path}"


def test_only_rank_0_looks_and_the_default_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    request = read_flags(["--metrics-file", "runs/metrics.jsonl"]).unchecked()
    assert [str(failure) for failure in place_failures(request)] == [
        f"--run-dir runs (the default) cannot be written: {tmp_path}/runs is not a folder. Use another folder.",
        f"--metrics-file runs/metrics.jsonl cannot be written: {tmp_path}/runs is not a folder. Use another file.",
    ]
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    assert list(place_failures(request)) == []


def source_problems(*words: str) -> list[str]:
    reading = read_flags(words)
    return [str(failure) for failure in source_failures(reading.unchecked(), reading.wrong)]


def test_all_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = source_problems("--train-data-path", "a", "--valid-data-path", "1", "b", "2", "c.jsonl")
    assert [name for name in ("a.idx", "b.idx", "c.jsonl") if name in text] == ["a.idx", "b.idx", "c.jsonl"]
    assert source_problems("--data-path", "1", "a", "b") == [], "a blend that cannot be read is refused as a flag"
    assert source_problems("--data-path", "a", "--objective", "telepathic") == []


def test_a_template_counts_where_examples_are_trained_on(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "a", "answer": "b"}\n')
    (text,) = source_problems("--data-path", str(chat), "--chat-template", "nothing")
    assert text.startswith("--chat-template nothing is neither plain, chatml")
    assert source_problems("--data-path", str(chat), "--chat-template", "chatml") == []
    (text,) = source_problems("--data-path", f"{tmp_path}/none", "--chat-template", "nothing")
    assert "chat-template" not in text


def test_a_folder_that_this_user_may_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    (text,) = source_problems("--data-path", f"{tmp_path}/corpus")
    assert text.startswith(
        f"{tmp_path}/corpus cannot be read: Permission denied ({tmp_path}/corpus.idx). Check the permissions."
    )


def refusals(*words: str) -> list[str]:
    reading = read_flags(words)
    return [str(failure) for failure in tokenizer_failures(reading.unchecked(), reading.wrong)]


def test_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("vocab.json", '{"a": 0}'), ("merges.txt", ""), ("vocab.txt", "[PAD]\n"), ("x.model", "\n\x0e")):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert refusals("--vocab-file", "vocab.json", "--merge-file", "merges.txt") == []
    assert len(refusals("--vocab-file", "vocab.txt", "--merge-file", "none")) == 2
    assert refusals("--tokenizer-type", "BertWordPieceCase", "--vocab-file", "vocab.txt") == []
    assert refusals("--tokenizer-type", "BertWordPieceCase", "--vocab-file", "none")[0].startswith(
        "--vocab-file none is not"
    )
    assert refusals("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "x.model") == []
    assert refusals("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "no.model")[0].startswith(
        "--tokenizer-model no"
    )
    assert refusals("--tokenizer-type", "Lama", "--vocab-file", "none") == [], "the type is refused"
    assert refusals("--vocab-file", "vocab.json") == [], "the other file is asked for"


def test_a_hugging_face_tokenizer_is_here_or_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ("--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path")
    (tmp_path / "tokenizer.json").write_text("not JSON")
    assert refusals(*kind, str(tmp_path))[0].startswith(
        f"{tmp_path}/tokenizer.json (tokenizer.json) begins with 'not JSON'"
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusals(*kind, str(tmp_path)) == []
    assert "is neither a local file or folder nor a Hub name" in refusals(*kind, f"{tmp_path}/none")[0]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "the package huggingface_hub, which can download it, is not installed" in refusals(*kind, "openai/gpt")[0]

"""Checkpoints that a run cannot do without must be there; others may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import log
from megatron.config.parse import read_flags
from megatron.train.preflight.files import file_failures


def said(*words: str) -> list[str]:
    return [str(failure) for failure in file_failures(read_flags(words).unchecked())]


def test_a_checkpoint_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, file, full = tmp_path / "empty", tmp_path / "file", tmp_path / "full"
    (full / "iter_0000004").mkdir(parents=True)
    empty.mkdir()
    file.touch()
    for flag in ("--finetune", "--eval-only", "--exit-on-missing-checkpoint"):
        (missing,) = said("--load", f"{tmp_path}/a/b", flag)
        assert missing.startswith(f"--load {tmp_path}/a/b does not exist, and {flag} needs a checkpoint from it; the")
        assert f"nearest folder that exists is {tmp_path}. " in missing
        assert "it is empty" in said("--load", str(empty), flag)[0]
        assert "cannot be listed: Not a directory" in said("--load", str(file), flag)[0]
        assert said("--load", str(full), flag) == []
        assert said("--load", str(empty), flag, "--save-secondary", str(full)) == [], "copies may be there"
    assert "--ckpt-step 4 needs a checkpoint" in said("--load", f"{tmp_path}/a", "--load-tag", "iter_0000004")[0]
    assert said("--load", f"{tmp_path}/a") == []
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    assert said("--load", f"{tmp_path}/a", "--finetune") == []


def test_a_teacher(tmp_path: Path) -> None:
    (text,) = said("--kd", "--load-teacher", f"{tmp_path}/none")
    assert text.startswith(f"--load-teacher {tmp_path}/none does not exist, and --kd needs a checkpoint from it; the")
    (tmp_path / "manifest.json").touch()
    assert said("--kd", "--load-teacher", str(tmp_path)) == []


def test_a_file_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").touch()
    assert said("--eval-tasks", f"{tmp_path}/tasks.yaml") == []
    assert said("--eval-tasks", str(tmp_path)) == [
        f"--eval-tasks {tmp_path} is not a file. Give the path of a YAML or JSON file of tasks."
    ]


def test_a_teacher_is_looked_for_unless_its_time_may_be_over(tmp_path: Path) -> None:
    def sentences(more: str) -> list[str]:
        return said("--load-teacher", f"{tmp_path}/t", *more.split())

    (missing,) = sentences("--kd")
    assert missing.startswith(f"--load-teacher {tmp_path}/t does not exist, and --kd needs a checkpoint from it; the")
    assert missing.endswith("Give the folder of the checkpoints of the teacher's run.")
    assert len(sentences("--mos")) == 1 and sentences("--mos --kd-iters 5") == []
    (tmp_path / "t").mkdir()
    assert "holds no checkpoint, it is empty, and --mos needs one" in sentences("--mos")[0]
    (tmp_path / "t" / "latest").write_text("")
    assert sentences("--kd") == []

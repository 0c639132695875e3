"""Checkpoints that a run cannot do without must be there; others may be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import log
from megatron.config.parse import read_flags
from megatron.train.preflight.inputs import file_failures


def said(*words: str) -> list[str]:
    return [str(failure) for failure in file_failures(read_flags(words).unchecked())]


def test_a_checkpoint_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, file, full = tmp_path / "empty", tmp_path / "file", tmp_path / "full"
    (full / "iter_0000004").mkdir(parents=True)
    empty.mkdir()
    file.touch()
    reasons = {
        "--finetune": "--finetune needs its weights",
        "--eval-only": "--eval-only needs its weights",
    }
    reasons["--exit-on-missing-checkpoint"] = "--exit-on-missing-checkpoint is set"
    for flag, reason in reasons.items():
        (missing,) = said("--load", f"{tmp_path}/a/b", flag)
        assert missing.startswith(f"--load {tmp_path}/a/b has no checkpoint, but {reason}: it does not exist (the near")
        assert f"nearest existing folder is {tmp_path}). " in missing
        assert f"{reason}: it is empty. " in said("--load", str(empty), flag)[0]
        assert f"{reason}: it cannot be listed (Not a directory). " in said("--load", str(file), flag)[0]
        assert said("--load", str(full), flag) == []
        assert said("--load", str(empty), flag, "--save-secondary", str(full)) == [], "copies may be there"
    assert "--ckpt-step 4 selects one of its steps" in said("--load", f"{tmp_path}/a", "--load-tag", "iter_0000004")[0]
    assert said("--load", f"{tmp_path}/a") == []
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    assert said("--load", f"{tmp_path}/a", "--finetune") == []


def test_a_file_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").touch()
    assert said("--eval-tasks", f"{tmp_path}/tasks.yaml") == []
    assert said("--eval-tasks", f"{tmp_path}/none.yaml") == [
        f"--eval-tasks {tmp_path}/none.yaml is not a file. Use a YAML or JSON file of tasks."
    ]


def test_a_teacher_is_looked_for_unless_its_time_may_be_over(tmp_path: Path) -> None:
    def sentences(more: str) -> list[str]:
        return said("--load-teacher", f"{tmp_path}/t", *more.split())

    (missing,) = sentences("--kd")
    assert missing.startswith(f"--load-teacher {tmp_path}/t has no checkpoint, but --kd needs its weights: it does")
    assert missing.endswith("Use the checkpoint folder of the teacher's run.")
    assert len(sentences("--mos")) == 1 and sentences("--mos --kd-iters 5") == []
    (tmp_path / "t").mkdir()
    assert "has no checkpoint, but --mos needs its weights: it is empty" in sentences("--mos")[0]
    (tmp_path / "t" / "latest").write_text("")
    assert sentences("--kd") == []

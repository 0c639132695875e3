"""Optional packages are looked for, not imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.config.parse import read_flags
from megatron.train.preflight.inputs import is_installed, package_failures

FLAGS = ["--wandb-project", "demo", "--tensorboard-dir", "events", "--tokenizer-type", "Llama2Tokenizer"]


def test_packages_that_are_missing_are_named_with_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "sentencepiece", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    request = read_flags(FLAGS).unchecked()
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

"""The program that builds the compiled operations, and the commands of docs/kernels.md."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from megatron import process_exit
from megatron.kernels.native.library import LIBRARY, RECORD
from tools import build_kernels


def test_a_build_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor word; do last=$word; done\necho "$*" > "$last"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(process_exit, "interrupt_on_sigterm", lambda: None)
    assert build_kernels.main(["--output", str(tmp_path / "built"), "--cuda", "no", "--only", "norm,optimizer"]) == 0
    assert sorted(path.name for path in (tmp_path / "built").iterdir()) == [RECORD, LIBRARY]
    said = capsys.readouterr().out
    assert "building 3 operation(s) for CPU: adamw, multi_tensor, norm" in said
    assert "or with --kernels csrc" in said

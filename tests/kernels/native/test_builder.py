"""Builds end with a library or with one sentence; what was there before stays."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from megatron.errors import ConfigError, LaunchError
from megatron.kernels.native.builder import BuildRequest, build
from megatron.kernels.native.library import LIBRARY, RECORD

SOURCE = "#include <torch/library.h>\nTORCH_LIBRARY_FRAGMENT(nothing, library) {}\n"


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildRequest:
    """A build of two operations with a compiler that writes what it is told to, except for one named `broken`."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nfor word; do last=$word; done\ncase "$*" in *sleepy.cpp*) sleep 20;; *broken.cpp*) '
        'echo "broken.cpp:1: error: it is broken" >&2; exit 1;; esac\necho built > "$last"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    for name in ("broken", "first", "second", "sleepy"):
        (tmp_path / "sources" / name).mkdir(parents=True)
        (tmp_path / "sources" / name / f"{name}.cpp").write_text(SOURCE)
    return BuildRequest(tmp_path / "library", ("first", "second"), cuda="no", sources=tmp_path / "sources")


def _with(request: BuildRequest, **changes: object) -> BuildRequest:
    return BuildRequest(**{**vars(request), **changes})  # type: ignore[arg-type]


def test_a_build_reports_its_progress_and_replaces_the_last(request_for: BuildRequest) -> None:
    lines: list[str] = []
    folder = build(request_for, lines.append)
    assert (folder / LIBRARY).read_text() == "built\n"
    assert '"first",\n    "second"' in (folder / RECORD).read_text()
    assert lines[0] == "building 2 operation(s) for CPU: first, second"
    assert [line[:5] for line in lines[1:3]] == ["[1/2]", "[2/2]"]
    build(_with(request_for, only=("second",)), lines.append)
    assert "first" not in (folder / RECORD).read_text()
    assert sorted(path.name for path in folder.iterdir()) == sorted([LIBRARY, RECORD])


def test_failures_are_sentences_and_lose_nothing(
    request_for: BuildRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = build(request_for, lambda line: None)
    before = (folder / RECORD).read_text()
    cases = {
        "broken.cpp:1: error: it is broken": {"only": ("broken",)},
        r"took longer than 1 s \(--time-limit 1\) .* compiled sleepy/sleepy.cpp": {"only": ("sleepy",), "seconds": 1},
        "a torch with CUDA, or build for the CPU only: --cuda no": {"cuda": "yes"},
    }
    for sentence, changes in cases.items():
        with pytest.raises(LaunchError, match=sentence):
            build(_with(request_for, **changes), lambda line: None)
    with pytest.raises(ConfigError, match="--only third: no such operation. Known are broken, first"):
        build(_with(request_for, only=("third",)), lambda line: None)
    with pytest.raises(ConfigError, match="clone it and build there"):
        build(_with(request_for, sources=tmp_path / "library"), lambda line: None)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(LaunchError, match="/no/such/compiler cannot be started: No such file"):
        build(request_for, lambda line: None)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"No C\+\+ compiler was found .*apt-get install g\+\+"):
        build(request_for, lambda line: None)
    assert (folder / RECORD).read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == sorted([LIBRARY, RECORD])

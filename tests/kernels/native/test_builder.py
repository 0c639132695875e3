"""Builds end with a library or with one sentence; what was there before stays."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError, LaunchError, StorageError
from megatron.kernels.native.builder import BuildRequest, build
from megatron.kernels.native.library import LIBRARY, RECORD

SOURCE = "#include <torch/library.h>\nTORCH_LIBRARY_FRAGMENT(nothing, library) {}\n"


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildRequest:
    """A build of two operations with a compiler that writes what it is told to, except for one named `broken`."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\nfor word; do last=$word; done\n"
        'case "$*" in *sleepy*) sleep 600;; *silent*) exit 1;; *broken*) '
        'echo "broken.cpp:1: error: it is broken" >&2; exit 1;; esac\necho built > "$last"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    for name in ("broken", "dropout_add", "first", "second", "silent", "sleepy"):
        (tmp_path / "sources" / name).mkdir(parents=True)
        (tmp_path / "sources" / name / f"{name}.cpp").write_text(SOURCE)
    return BuildRequest(tmp_path / "library", ("first", "second"), cuda="no", jobs=3, sources=tmp_path / "sources")


def _with(request: BuildRequest, **changes: object) -> BuildRequest:
    return BuildRequest(**{**vars(request), **changes})  # type: ignore[arg-type]


def test_a_build_reports_its_progress_and_replaces_the_last(request_for: BuildRequest) -> None:
    lines: list[str] = []
    folder = build(request_for, lines.append)
    assert (folder / LIBRARY).read_text() == "built\n"
    assert '"first",\n    "second"' in (folder / RECORD).read_text()
    assert lines[0] == "building 2 operation(s) for CPU: first, second"
    assert sorted(line.split(": ")[0][6:] for line in lines[1:3]) == ["first for the CPU", "second for the CPU"]
    assert [line[:5] for line in lines[1:3]] == ["[1/2]", "[2/2]"]
    build(_with(request_for, only=("second",)), lines.append)
    assert "first" not in (folder / RECORD).read_text()
    assert sorted(path.name for path in folder.iterdir()) == sorted([LIBRARY, RECORD])


def test_operations_share_a_compiler_unless_their_flags_differ(request_for: BuildRequest) -> None:
    assert request_for.sources is not None
    (request_for.sources / "second" / "second.cpp").write_text(100 * SOURCE)
    lines: list[str] = []
    build(_with(request_for, only=("first", "second", "dropout_add"), jobs=2), lines.append)
    assert [line[:5] for line in lines[1:3]] == ["[1/2]", "[2/2]"]
    assert {line.split(": ")[0][6:] for line in lines[1:3]} == {"second, first for the CPU", "dropout_add for the CPU"}


def test_failures_are_sentences_and_lose_nothing(
    request_for: BuildRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = build(request_for, lambda line: None)
    before = (folder / RECORD).read_text()
    cases = {
        "broken.cpp:1: error: it is broken": {"only": ("broken",)},
        "failed .exit status 1.:\n.*compiler printed nothing": {"only": ("silent",)},
        r"1 s \(--time-limit 1\) .* compiled sleepy for the CPU. Raise the limit\.$": {
            "only": ("sleepy",),
            "seconds": 1,
        },
        "a torch with CUDA, or build for the CPU only: --cuda no": {"cuda": "yes"},
    }
    for sentence, changes in cases.items():
        with pytest.raises(LaunchError, match=sentence):
            build(_with(request_for, **changes), lambda line: None)
    with pytest.raises(ConfigError, match="--only third: unknown operation. Choose from broken, dropout_add, first"):
        build(_with(request_for, only=("third",)), lambda line: None)
    with pytest.raises(ConfigError, match="--architectures 90,abc: 'abc' is not a compute capability"):
        build(_with(request_for, architectures=("90", "abc")), lambda line: None)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Cannot write the library to .*file: File exists"):
        build(_with(request_for, folder=tmp_path / "file"), lambda line: None)
    with pytest.raises(ConfigError, match="clone it and build there"):
        build(_with(request_for, sources=tmp_path / "library"), lambda line: None)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(LaunchError, match="Cannot start /no/such/compiler: No such file"):
        build(request_for, lambda line: None)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"No C\+\+ compiler found .*apt-get install g\+\+"):
        build(request_for, lambda line: None)
    assert (folder / RECORD).read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == sorted([LIBRARY, RECORD])


def test_an_interrupted_build_ends_its_compilers_and_begins_no_other(request_for: BuildRequest) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("[1/"):
            raise KeyboardInterrupt

    began_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build(_with(request_for, only=("first", "sleepy", "second", "dropout_add"), jobs=3), interrupt)
    assert time.monotonic() - began_at < 120  # the compiler of one of them sleeps for 600 s
    assert request_for.folder is not None and not list(request_for.folder.iterdir())


def test_names_of_kernels_stand_for_their_parts_and_remains_are_removed(request_for: BuildRequest) -> None:
    assert request_for.sources is not None and request_for.folder is not None
    for name in ("adamw", "multi_tensor"):
        (request_for.sources / name).mkdir()
        (request_for.sources / name / f"{name}.cpp").write_text(SOURCE)
    remains = request_for.folder / "build-1"
    remains.mkdir(parents=True)
    os.utime(remains, (1, 1))
    lines: list[str] = []
    build(_with(request_for, only=("optimizer,first",)), lines.append)
    assert lines[0].endswith("3 operation(s) for CPU: adamw, first, multi_tensor")
    assert not remains.exists()

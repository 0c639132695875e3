"""The demo corpus from what a Python installation contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import DataError, StorageError
from trident.corpus.inputs import demo


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small installation in place of this one."""
    root = tmp_path / "lib"
    (root / "data").mkdir(parents=True)
    (root / "a.py").write_text(f'"""{"Prose. " * 40}"""\n')
    (root / "test_z.py").write_text("x = 1\n" * 100)
    (root / "short.py").write_text("x = 1\n")
    (root / "data" / "left_out.py").write_text("x = 1\n" * 100)
    paths = {"stdlib": str(root), "purelib": str(tmp_path / "none"), "platlib": str(tmp_path / "none")}
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: paths)
    return root


def test_modules_come_before_tests_and_docstrings_before_sources(installation: Path) -> None:
    assert [source for source, _ in demo.corpus_documents()] == [
        "stdlib/a.py#docstrings",
        "stdlib/a.py",
        "stdlib/test_z.py",
    ]


def test_lines_are_written_until_there_are_enough(installation: Path, tmp_path: Path) -> None:
    written = demo.write_demo_corpus(tmp_path / "new" / "demo.jsonl", 400)
    lines = (tmp_path / "new" / "demo.jsonl").read_bytes().splitlines()
    assert written.documents == len(lines) == 2 and json.loads(lines[0])["src"] == "stdlib/a.py#docstrings"


def test_too_little_text_is_named(installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "prefix", "/opt/{python}")
    expected = r"Only \d+ bytes of source text are in this Python \(/opt/\{python\}\); 10000000 are required"
    with pytest.raises(DataError, match=expected):
        demo.write_demo_corpus(tmp_path / "demo.jsonl", 10**7)
    assert not (tmp_path / "demo.jsonl").exists()


def test_a_folder_as_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        demo.write_demo_corpus(tmp_path, 10)

"""A library that does not fit is rejected with one warning."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.kernels.native import library as subject
from megatron.kernels.native.library import (
    LIBRARY,
    RECORD,
    Library,
    default_folder,
    digest_of,
    digest_of_sources,
    library,
)


def test_a_fitting_library_has_its_operations_on_the_cpu(compiled: Library) -> None:
    assert library(compiled.folder) is compiled
    assert compiled.has("dropout_add", "cpu")
    assert not compiled.has("no_such_operation", "cpu") and not compiled.has("dropout_add", "meta")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"torch": "1.0.0"}, "it was built for torch 1.0.0, and this is torch"),
        ({"machine": "vax"}, "it was built for vax, and this machine is"),
        ({"interface": 0}, "it has interface 0, and this version of the project requires"),
        ({"sources": "0" * 64}, "its sources had digest 000000000000, and "),
        ({"sources": ""}, "its sources had digest unknown, and "),
        ({"cpu_features": ["avx2000"]}, "it was built with --native for a CPU with avx2000, which this one lacks"),
        ({"operations": None}, "its record build.json is damaged"),
        ({"sha256": "0"}, "libmegatron_ops.so does not match build.json"),
        ({}, "it cannot be loaded ("),
        ({"folder": "another"}, "this process has loaded "),
    ],
)
def test_another_library_is_not_used(
    compiled: Library,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    sentence: str,
) -> None:
    assert library(tmp_path / "nothing") is None
    record = json.loads((compiled.folder / RECORD).read_text("utf-8"))
    if change:
        shutil.copy(compiled.folder / LIBRARY, tmp_path / LIBRARY)
    else:
        monkeypatch.setattr(torch.ops, "loaded_libraries", set())
        (tmp_path / LIBRARY).write_bytes(b"not a library")
        change = {"sha256": digest_of(tmp_path / LIBRARY)}
    (tmp_path / RECORD).write_text(json.dumps({**record, **change}), "utf-8")
    for _ in range(2):
        assert library(tmp_path) is None
    said = capfd.readouterr()
    text = said.out + said.err
    assert text.count("is not used: " + sentence) == 1 and "python tools/build_kernels.py" in text


def test_an_installed_package_without_sources_takes_its_library(
    monkeypatch: pytest.MonkeyPatch, compiled: Library, tmp_path: Path
) -> None:
    outdated = dataclasses.replace(compiled, sources="0" * 64)
    assert "its sources had digest" in str(subject._unfit(outdated))
    monkeypatch.setattr(subject, "SOURCES", tmp_path / "csrc" / "ops")
    assert subject._unfit(outdated) is None


def test_a_digest_follows_what_is_compiled(tmp_path: Path) -> None:
    assert digest_of_sources(tmp_path / "nothing") == ""
    (tmp_path / "norm").mkdir()
    digests = []
    for name, text in (("norm/norm.h", "a"), ("norm/norm.cu", "b"), ("norm/norm.cu", "c"), ("norm/norm.md", "d")):
        (tmp_path / name).write_text(text)
        digests.append(digest_of_sources(tmp_path))
    assert len(set(digests)) == 3 and digests[2] == digests[3]


def test_the_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_folder().name == "binaries"
    monkeypatch.setenv("MEGATRON_KERNELS", str(tmp_path))
    assert default_folder() == tmp_path


def test_code_for_a_gpu_runs_on_later_minor_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = Library(tmp_path, 1, torch.__version__, "x86_64", "", ("norm",), (80, 90))
    found = {}
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, at=capability: at)
        found[capability] = built.has("norm", "cuda")
    assert [capability for capability, runs in found.items() if runs] == [(8, 0), (8, 9), (9, 0)]

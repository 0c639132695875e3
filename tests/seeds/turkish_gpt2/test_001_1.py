"""Scenario 001.1: what the installation needs, and what `doctor.py` says of it.

`tests/packaging/test_packaging.py` and every CI run show that the package installs without a compiler and without CUDA.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import pytest

from tests.seeds.turkish_gpt2.guide import ROOT, Guide

pytestmark = [pytest.mark.xdist_group("turkish"), pytest.mark.slow]


def test_001_1_doctor_shows_versions_backend_cores_and_what_is_off(turkish: Guide) -> None:
    """Its exit code was 0: the page's shell ends at the first command that fails."""
    said = turkish.output.partition("Wrote my-corpus.json")[0]
    assert "Training can start." in said
    found = dict(re.findall(r"^  \w+ +([\w -]+?)  +(\S.*)$", said, flags=re.M))
    assert found["torch"] == importlib.metadata.version("torch") and "gloo" in found and "index builder" in found
    assert (
        found["gloo"] == "available, and the default here" and found["--fp16"] == "not available on the CPU; use --bf16"
    )
    assert found["cores"] == f"{len(os.sched_getaffinity(0))} usable by this process"


def test_the_extra_of_the_page_exists(turkish: Guide) -> None:
    (extra,) = re.findall(r"^install \.\[(\w+)\]$", (turkish.folder / "pip.log").read_text(), flags=re.M)
    package = Path(ROOT, "pyproject.toml").read_text()
    needed, _, extras = package.partition("[project.optional-dependencies]")
    assert re.search(rf"^{extra} = \[", extras, flags=re.M)
    assert not re.search(r'"(apex|ninja|nvidia)', needed)

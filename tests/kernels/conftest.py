"""The compiled operations, built once for all processes of a test session."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from megatron.errors import LaunchError
from megatron.kernels.native.builder import BuildRequest, build
from megatron.kernels.native.library import Library, library

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "ops"


@pytest.fixture(scope="session")
def compiled() -> Library:
    """The library of `csrc/ops`, loaded into this process; only tests of kernels call it."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")]):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    folder = ROOT / "build" / "kernels" / digest.hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "wb") as lock:  # another process builds with all cores: waiting is as fast
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(folder)
    found = library(folder)
    assert found is not None
    return found


def _build(folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        build(BuildRequest(folder=scratch, cuda="no", native=True), lambda line: None)
        os.replace(scratch, folder)
    except LaunchError as failure:
        if "No C++ compiler" in str(failure):
            pytest.skip("no C++ compiler is installed")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""The compiled operations, built once for all processes of a test session, for a GPU too where there is one."""

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
from megatron.kernels.native.library import INTERFACE, SOURCES, Library, digest_of_sources, library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def compiled() -> Library:
    """The library of `csrc/ops`, loaded into this process; only tests of kernels call it.

    Where there is a GPU, the one that was built for runs serves, since a process can load one only.
    """
    if torch.cuda.is_available():
        installed = library()
        if installed is not None and all(installed.has(operation, "cuda") for operation in _operations()):
            return installed
    built_for = f"{INTERFACE} {torch.__version__} {torch.cuda.is_available()}"
    name = hashlib.sha256(f"{digest_of_sources(SOURCES)} {built_for}".encode())
    folder = ROOT / "build" / "kernels" / name.hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "wb") as lock:  # another process builds with all cores: waiting is as fast
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(folder)
    found = library(folder)
    assert found is not None
    return found


def _operations() -> list[str]:
    return [path.stem for path in SOURCES.glob("*/*.cu")]


def _build(folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    request = BuildRequest(folder=scratch, cuda="no", native=True)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        request = BuildRequest(folder=scratch, cuda="yes", native=True, architectures=(f"{major}{minor}",))
    try:
        build(request, lambda line: None)
        os.replace(scratch, folder)
    except LaunchError as failure:
        if "No C++ compiler" in str(failure) or "kernels for GPUs cannot be built" in str(failure):
            pytest.skip(str(failure))
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""Packaging: builds without a compiler with a warning, and contains what the metadata says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = ("flags/legacy_flags.txt", "files/deepspeed_keys.txt")


def build_extension(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Builds the extension in a copy of what its build needs."""
    return run_setup(folder, ["build_ext", "--inplace"], **variables)


def run_setup(folder: Path, command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of setup.py in a copy of what the extension's build needs."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pybind11")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "megatron/data/order").mkdir(parents=True)
    shutil.copy(ROOT / "megatron/__init__.py", folder / "megatron")
    (folder / "megatron/data/__init__.py").touch()
    (folder / "megatron/data/order/__init__.py").touch()
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", ["missing", "broken", "unwanted"])
def test_without_a_compiler_the_build_succeeds_with_a_warning(tmp_path, kind):
    compiler = "/nonexistent/compiler" if kind == "missing" else shutil.which("false") or "false"
    variables = {"MEGATRON_SKIP_EXTENSIONS": "1"} if kind == "unwanted" else {"CC": compiler, "CXX": compiler}
    done = build_extension(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert "the compiled index builder was not built" in done.stderr
    assert "takes more time and memory (NumPy builds the same one)" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
@pytest.mark.slow
def test_with_a_compiler_the_extension_is_in_its_package(tmp_path):
    if not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("there is no C++ compiler here")
    done = build_extension(tmp_path)
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "megatron/data/order").glob("_index_builder*")
    code = f"""
import importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_index_builder", {str(built)!r})
spec = importlib.util.spec_from_loader("_index_builder", loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
print(module.INTERFACE)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert shown.stdout.strip() == "3", shown.stderr


def test_an_installed_package_has_the_presets_and_the_tables_of_flags(tmp_path):
    shutil.copytree(ROOT / "examples/configs", tmp_path / "examples/configs")
    for name in ("__init__.py", "flags/__init__.py", "files/__init__.py", *TABLES):
        place = tmp_path / "megatron/config" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "megatron/config" / name, place)
    done = run_setup(tmp_path, ["build_py", "--build-lib", "built"])
    assert done.returncode == 0, done.stderr
    installed = {path.name for path in (tmp_path / "built/megatron/presets").iterdir()}
    assert installed == {path.name for path in (ROOT / "examples/configs").iterdir()}
    assert all((tmp_path / "built/megatron/config" / name).is_file() for name in TABLES)
    assert "recursive-include examples/configs *.yaml" in (ROOT / "MANIFEST.in").read_text()


def test_every_package_is_installed():
    setuptools = pytest.importorskip("setuptools")
    found = setuptools.find_packages(str(ROOT), include=["megatron", "megatron.*", "trident", "trident.*"])
    modules = (path for root in ("megatron", "trident") for path in (ROOT / root).rglob("*.py"))
    assert set(found) == {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in modules}

"""megatron-core from PyPI, which shares the import name of this project, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


def python_with_core(folder: Path) -> str:
    """An interpreter that sees megatron-core, and of this environment the rest (torch, NumPy) but not this project.

    Skips the test where it cannot be installed.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(packages)]
    try:
        subprocess.run([*pip, "megatron-core>=0.12"], check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
        pytest.skip(f"megatron-core cannot be installed here: {failure}")
    here = "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    (packages / "rest.pth").write_text(here + "\n")  # the .pth files in there, one of them ours, are not read
    return str(folder / "bin" / "python")

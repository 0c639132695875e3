"""The host code of the CUDA operations, between torch and the launchers, with emulated kernels behind it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from csrc.emulator.harness import builds
from megatron.processor import cpu_features


# The binding that sorts, allocates and launches twice; the program takes others, which compile for 10 s each.
@pytest.mark.skipif("fma" not in cpu_features(), reason="the CPU has no fused multiply-add")
@pytest.mark.parametrize("operation", ["embedding"])
def test_bindings_call_their_launchers_rightly(operation: str) -> None:
    builds.binding(operation)
    command = [sys.executable, "-m", "tests.kernels.emulator.binding_program", operation]
    done = subprocess.run(command, cwd=builds.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

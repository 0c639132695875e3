"""Prerequisites of the timed parts, and their correctness tests: the compiled operations, the programs of
torch.compile, and the tests of what is new on a GPU. Nothing here is timed, so that all of it runs at the same time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.context import Context
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.programs import PYTEST, build_kernels, record_tests, run
from benchmarks.gpu.runs import has_compiled_kernels

# Of graphs, the device and the operations: a minute, where all tests of GPUs take three.
TESTS = ("tests/test_device.py", "tests/engine/test_cuda_graphs.py", "tests/kernels/devices")
# The networks whose memory fits one GPU at the same time.
COMPILED = (("124m", "1.3b"), ("llama1b",))


def get_ready(context: Context) -> None:
    """Builds the operations along with the peers' programs, then runs tests along with the last of these."""
    ends_at = time.monotonic() + context.seconds
    first = [_compiling(context, part) for part in COMPILED[0]]
    if has_compiled_kernels(context):
        context.recorder.note("build", "the library that is there fits")
    else:
        build_kernels(context)
    _end(context, first, ends_at - 0.4 * context.seconds)
    second = [_compiling(context, part) for part in COMPILED[1]]
    tests = TESTS[:1] if context.is_tiny else ("-n8", *TESTS)
    done = run(context, *PYTEST, *tests, seconds=_left(ends_at))
    record_tests(context, done.stdout)
    _end(context, second, ends_at)


def _compiling(context: Context, part: str) -> subprocess.Popen[str]:
    """A process that trains plain PyTorch for a few steps, whose programs torch.compile keeps in its cache."""
    folder = tempfile.mkdtemp(dir=context.scratch)
    command = [sys.executable, "-m", "benchmarks.gpu", "--only-this", part, "--contender", "plain", "--output", folder]
    command += ["--scale", context.scale, "--device", context.device.type]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )


def _end(context: Context, processes: list[subprocess.Popen[str]], at: float) -> None:
    for process in processes:
        try:
            process.wait(_left(at))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            context.recorder.note("stopped", f"a program of torch.compile: {process.args[4]}")  # type: ignore[index]


def _left(ends_at: float) -> float:
    return max(1.0, ends_at - time.monotonic())

"""Parts that run programs: the build of the operations, the tests of GPUs, compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.records import Target

NONE = Target(at_most=0.0)
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_GPU_TESTS = re.compile(r"\bmark\.gpu\b|\bdevices\.checks import\b")
_SANITIZER_ERRORS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
TOOLS = ("memcheck", "racecheck")
# Of our kernels alone: whole training steps would take minutes, most of them in the kernels of others.
KERNEL_TESTS = ("tests/kernels/devices/test_operations.py", "tests/kernels/devices/test_lists.py")
PYTEST = ("-m", "pytest", "-m", "gpu", "-q", "-n0", "-p", "no:cacheprovider")


def build_kernels(context: Context) -> None:
    """Builds csrc/ops for this torch and this GPU, where nvcc is found."""
    if context.device.type != "cuda" or shutil.which("nvcc") is None or torch.version.cuda is None:
        context.recorder.note("not built", "needs a GPU, nvcc and a torch with CUDA")
        return
    major, minor = torch.cuda.get_device_capability(context.device)
    began_at = time.monotonic()
    done = run(context, "tools/build_kernels.py", "--cuda", "yes", "--architectures", f"{major}{minor}")
    context.recorder.figure("build, exit status", done.returncode, "", target=NONE)
    context.recorder.figure("build", time.monotonic() - began_at, "s")


def run_tests(context: Context) -> None:
    """Every test that is marked `gpu`."""
    record_tests(context, run(context, *PYTEST, *files_of_gpu_tests(ROOT / "tests")).stdout)


def files_of_gpu_tests(folder: Path) -> list[str]:
    """The files with such tests: reading all others takes longer than running these.

    A file marks its tests, or takes the devices that `tests/kernels/devices` marks.
    """
    paths = sorted(folder.rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if _GPU_TESTS.search(path.read_text("utf-8"))]


def record_tests(context: Context, printed: str) -> None:
    """Records the counts in pytest's last line."""
    counts = test_counts(printed)
    context.recorder.figure("tests passed", counts["passed"], "")
    context.recorder.figure("tests skipped", counts["skipped"], "")
    context.recorder.figure("tests failed", counts["failed"] + counts["error"], "", target=NONE)
    for line in printed.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            context.recorder.note("failed", line[:300])


def test_counts(printed: str) -> dict[str, int]:
    """The numbers of pytest's summary; a run without one counts as an error."""
    lines = [line for line in printed.splitlines() if _COUNTS.search(line) and " in " in line]
    counts = {"passed": 0, "failed": 0, "skipped": 0, "error": 0 if lines else 1}
    for number, kind in _COUNTS.findall(lines[-1] if lines else ""):
        counts[kind.rstrip("s") if kind.startswith("error") else kind] += int(number)
    return counts


def sanitize(context: Context) -> None:
    """The kernels' tests under compute-sanitizer: bad memory accesses, then races in shared memory."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        context.recorder.note("not run", "compute-sanitizer is not installed")
        return
    for tool in TOOLS:
        words = [program, "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
        tests = (*PYTEST, *KERNEL_TESTS)
        done = run(context, *tests, before=words, seconds=context.seconds / len(TOOLS))
        found = _SANITIZER_ERRORS.findall(done.stdout)
        if not found:
            context.recorder.note("no result", done.stdout[-300:], of=tool, status=done.returncode)
            continue
        context.recorder.figure("errors", sum(map(int, found)), "", target=NONE, of=tool)
        record_tests(context, done.stdout)


def run(
    context: Context, *words: str, before: Sequence[str] = (), seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with arguments, within the part's time limit; its output is kept in a file next to the results."""
    command = [*before, sys.executable, *words]
    limit = context.seconds if seconds is None else seconds
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            context.recorder.note("stopped", f"after {limit:.0f} s: {' '.join(words)[:200]}")
    with (context.output / f"{context.part}.log").open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n{printed}\n")
    return subprocess.CompletedProcess(command, process.returncode, printed, "")

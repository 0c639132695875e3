"""Parts that run programs: the build of the operations, the tests of GPUs, compute-sanitizer, the 345M block."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import pretrain_gpt
from benchmarks.gpu.context import Context
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.records import Target
from benchmarks.gpu.runs import corpus_flags
from megatron.observe.metrics_file import read_steps

NONE = Target(at_most=0.0)
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_SANITIZER_ERRORS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
TOOLS = ("memcheck", "racecheck")
PYTEST = ("-m", "pytest", "-m", "gpu", "-q", "-n0", "-p", "no:cacheprovider")

# The block of 345 million parameters, as bigscience's README gives it, for 20 steps.
BLOCK = (
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--micro-batch-size", "4", "--global-batch-size", "8", "--lr", "0.00015"),
    *("--lr-decay-iters", "320000", "--lr-decay-style", "cosine", "--checkpoint-activations", "--fp16"),
)
TINY_BLOCK = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "4", "--global-batch-size", "8", "--lr", "0.005"),
    *("--lr-decay-iters", "320000", "--lr-decay-style", "cosine", "--checkpoint-activations"),
)
BLOCK_STEPS = 20


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
    """The files with such tests: reading all others takes longer than running these."""
    paths = sorted(folder.rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text("utf-8")]


def record_tests(context: Context, printed: str) -> None:
    """Records what pytest's last line says."""
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
        tests = (*PYTEST, *files_of_gpu_tests(ROOT / "tests" / "kernels"))
        done = run(context, *tests, before=words, seconds=context.seconds / len(TOOLS))
        found = _SANITIZER_ERRORS.findall(done.stdout)
        if not found:
            context.recorder.note("no result", done.stdout[-300:], of=tool, status=done.returncode)
            continue
        context.recorder.figure("errors", sum(map(int, found)), "", target=NONE, of=tool)
        record_tests(context, done.stdout)


def train_the_block(context: Context) -> None:
    """20 steps of the 345M block in float16 through pretrain_gpt.py, on drawn tokens."""
    tokens, vocab = (16384, 257) if context.is_tiny else (2**21, 50257)
    run_folder = context.scratch / "block"
    status = pretrain_gpt.main(
        [
            *(TINY_BLOCK if context.is_tiny else BLOCK),
            *corpus_flags(context.scratch / "data", vocab, tokens),
            *("--vocab-size", str(vocab), "--train-iters", "500000", "--exit-interval", str(BLOCK_STEPS)),
            *("--lr-warmup-fraction", "0", "--log-interval", "1", "--eval-iters", "0", "--run-dir", str(run_folder)),
        ]
    )
    steps = read_steps(run_folder)
    context.recorder.figure("exit status", status, "", target=NONE)
    context.recorder.figure("steps", len(steps), "", target=Target(at_least=BLOCK_STEPS))
    if not steps:
        return
    for name in ("lm_loss", "loss_scale"):
        values = [step[name] for step in steps.values() if step.get(name) is not None]
        if values:
            context.recorder.note(name, f"{values[0]:.5g} at first, {values[-1]:.5g} at last")
    later = list(steps.values())[BLOCK_STEPS // 2 :]
    rates = [step["tokens_per_second"] for step in later if step.get("tokens_per_second") is not None]
    if rates:
        context.recorder.figure("tokens per second, median of the second half", statistics.median(rates), "tokens/s")


def run(
    context: Context, *words: str, before: Sequence[str] = (), seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with some words, within the part's time; what it prints is kept in a file beside the results."""
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

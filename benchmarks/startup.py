"""Seconds from the start of `python pretrain_gpt.py`, one process on the CPU, to the first logged iteration.

    python benchmarks/startup.py

Prints one JSON line per measurement. The data is prepared before timing starts; the index cache is cold in the first
run and warm in the others. `import_torch_and_deepspeed` is the part that no such program can avoid. Then a process
trains two steps and saves: `python_files` counts the files that it opens for modules (`.py`, `.pyc`), which at a large
start every rank reads from one file system.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.config.sections.reporting import MEGATRON_STYLE

ROOT = Path(__file__).resolve().parent.parent
FIRST_ITERATION = " iteration        1/"
# Runs a program, and prints at its end the number of module files that it opened.
COUNTING = """
import runpy, sys
opened = set()
def note(event, details):
    if event == "open" and isinstance(details[0], str) and details[0].endswith((".py", ".pyc")):
        opened.add(details[0])
sys.addaudithook(note)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("files of modules:", len(opened), file=sys.__stderr__)
"""


@dataclass(frozen=True)
class StartupFlags(ConfigSection):
    """Flags of this program."""

    repeats: int = flag(5, "starts with a warm index cache, after one with a cold cache", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the trainer several times and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(StartupFlags, words, prog="startup.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = quickstart_data(folder)

        def start(number: int) -> float:
            command = [*demo.training_flags(f"run{number}"), "--micro-batch-size", 1, "--train-iters", 2]
            command += ["--max-failed-starts", 0]  # every start is killed, which would count as failing on one batch
            return seconds_to_first_iteration([*command, "--log-interval", 1, "--log-style", MEGATRON_STYLE])

        cold = start(0)
        warm = [start(number + 1) for number in range(flags.repeats)]
        imports = [seconds_of_imports() for _ in range(flags.repeats)]
        refused = [seconds_to_refuse() for _ in range(flags.repeats)]
        ending = ["--micro-batch-size", 1, "--train-iters", 2, "--from-scratch"]
        opened = files_opened([ROOT / "pretrain_gpt.py", *demo.training_flags("counted"), *ending])
    print_figure("startup", "seconds_to_first_iteration", statistics.median(warm), "s", spread=(min(warm), max(warm)))
    print_figure("startup", "seconds_to_first_iteration_cold_cache", cold, "s")
    print_figure("startup", "import_torch_and_deepspeed", statistics.median(imports), "s")
    print_figure("startup", "seconds_to_refuse_a_wrong_flag", statistics.median(refused), "s")
    print_figure("startup", "python_files", opened, "files")
    return 0


def files_opened(command: Sequence[object]) -> int:
    """The number of module files that a program opens.

    Raises:
        RuntimeError: it failed.
    """
    words = [sys.executable, "-c", COUNTING, *map(str, command)]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment())
    if ended.returncode:
        raise RuntimeError(f"the trainer ended with {ended.returncode}:\n{ended.stderr}")
    return int(ended.stderr.rpartition("files of modules: ")[2].split()[0])


def seconds_to_first_iteration(flags: Sequence[object]) -> float:
    """Starts the trainer, waits for the log line of its first iteration, and kills it.

    Raises:
        RuntimeError: it ended before its first iteration.
    """
    started_at = time.perf_counter()
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *map(str, flags)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            for line in process.stdout or ():
                if line.startswith(FIRST_ITERATION):
                    return time.perf_counter() - started_at
        finally:
            process.kill()
        raise RuntimeError(f"the trainer logged no iteration:\n{process.stderr.read() if process.stderr else ''}")


def seconds_of_imports() -> float:
    """The time to import torch and DeepSpeed in a new interpreter."""
    started_at = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import torch, deepspeed"], check=True, capture_output=True, env=environment()
    )
    return time.perf_counter() - started_at


def seconds_to_refuse() -> float:
    """The time to reject a misspelled flag."""
    started_at = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "pretrain_gpt.py"), "--num-layer", "2"], capture_output=True)
    return time.perf_counter() - started_at


def environment() -> dict[str, str]:
    """The environment of one thread on the CPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


if __name__ == "__main__":
    process_exit.exit_with(main)

"""Builds the library of compiled operations: compilers in parallel, in a temporary folder; then the result is moved.

Nothing is locked: a build that was killed leaves a temporary folder and the library that was there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.errors import ConfigError, LaunchError
from megatron.kernels.native.compilers import SOURCES, Toolchain, find_toolchain
from megatron.kernels.native.library import INTERFACE, LIBRARY, RECORD, default_folder

Report = Callable[[str], object]
_SHOWN_LINES = 20  # of what a compiler says when it fails


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        folder: where the library goes; None for the package.
        only: the operations; all if empty.
        cuda: `yes`, `no` or `auto`.
        architectures: compute capabilities of GPUs, such as "90".
        jobs: compilers at the same time; one per core if None.
        seconds: after which the build is given up.
        native: code for the CPU of this machine only, which compiles three times as fast.
        sources: the folder csrc/ops; that of this checkout if None.
    """

    folder: Path | None = None
    only: tuple[str, ...] = ()
    cuda: str = "auto"
    architectures: tuple[str, ...] = ("80", "90", "100")
    jobs: int | None = None
    seconds: int = 1800
    native: bool = False
    sources: Path | None = None


def build(request: BuildRequest, report: Report) -> Path:
    """Builds the library and returns its folder.

    Raises:
        ConfigError: an operation is not known, or there are no sources.
        LaunchError: a compiler is missing, fails, or takes too long.
    """
    sources = request.sources or Path(__file__).resolve().parents[3] / SOURCES
    operations = _operations(sources, request.only)
    tools = find_toolchain(request.cuda, request.architectures, native=request.native)
    target = request.folder or default_folder()
    target.mkdir(parents=True, exist_ok=True)
    devices = f"CPU and CUDA sm_{', sm_'.join(tools.architectures)}" if tools.nvcc else "CPU"
    report(f"building {len(operations)} operation(s) for {devices}: {', '.join(operations)}")
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=target) as name:
        folder = Path(name)
        runner = _Runner(request.jobs or os.cpu_count() or 1, began_at + request.seconds, request.seconds, report)
        objects, commands = [], []
        for source in _source_files(sources, operations, with_cuda=tools.nvcc is not None):
            result = folder / f"{source.name}.o"
            compile_one = tools.compile_device if source.suffix == ".cu" else tools.compile_host
            commands.append((f"{source.parent.name}/{source.name}", compile_one(sources, source, result)))
            objects.append(result)
        runner.run_all(commands)
        runner.run_all([(LIBRARY, tools.link(objects, folder / LIBRARY))])
        (folder / RECORD).write_text(json.dumps(_record(tools, operations), indent=2) + "\n", "utf-8")
        # The record goes last and comes last: without it, nothing is loaded.
        with contextlib.suppress(FileNotFoundError):
            (target / RECORD).unlink()
        for part in (LIBRARY, RECORD):
            os.replace(folder / part, target / part)
    report(f"built {target / LIBRARY} in {time.monotonic() - began_at:.0f} s")
    return target


def _operations(sources: Path, only: Sequence[str]) -> list[str]:
    """The operations to build, by their folders."""
    known = sorted(path.name for path in sources.glob("*/") if (path / f"{path.name}.cpp").is_file())
    if not known:
        raise ConfigError(
            f"There are no sources of kernels in {sources}. They are part of the repository, not of an installed "
            "package: clone it and build there."
        )
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)}: no such operation. Known are {', '.join(known)}.")
    return [name for name in known if not only or name in only]


def _source_files(sources: Path, operations: Sequence[str], *, with_cuda: bool) -> Iterator[Path]:
    for operation in operations:
        for suffix in (".cpp", ".cu") if with_cuda else (".cpp",):
            path = sources / operation / f"{operation}{suffix}"
            if path.is_file():
                yield path


def _record(tools: Toolchain, operations: Sequence[str]) -> dict[str, object]:
    return {
        "interface": INTERFACE,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "operations": list(operations),
        "architectures": [int(code) for code in tools.architectures] if tools.nvcc else [],
    }


class _Runner:
    """Runs commands, so many at a time, until one fails or time is up."""

    def __init__(self, jobs: int, ends_at: float, limit_seconds: int, report: Report) -> None:
        self._jobs, self._ends_at, self._limit, self._report = jobs, ends_at, limit_seconds, report

    def run_all(self, commands: Sequence[tuple[str, list[str]]]) -> None:
        """Runs named commands.

        Raises:
            LaunchError: one fails; those that have not begun do not run.
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            pending: dict[Future[float], str] = {pool.submit(self._run, *command): command[0] for command in commands}
            done_count = 0
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    name = pending.pop(future)
                    try:
                        seconds = future.result()
                    except LaunchError:
                        pool.shutdown(cancel_futures=True)
                        raise
                    done_count += 1
                    self._report(f"[{done_count}/{len(commands)}] {name}: {seconds:.0f} s")

    def _run(self, name: str, command: list[str]) -> float:
        began_at = time.monotonic()
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(0.1, self._ends_at - began_at),
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"The build took longer than {self._limit} s (--time-limit {self._limit}) and was stopped while it "
                f"compiled {name}. Give it more time, or build fewer operations: --only NAME."
            ) from None
        except OSError as failure:
            raise LaunchError(f"{command[0]} cannot be started: {failure.strerror}. Check CXX and CUDA_HOME.") from None
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            raise LaunchError(
                f"Compiling {name} failed (exit status {result.returncode}):\n"
                + "\n".join(lines[:_SHOWN_LINES])
                + f"\nThe command was: {shutil.which(command[0]) or command[0]} {' '.join(command[1:])}"
            )
        return time.monotonic() - began_at

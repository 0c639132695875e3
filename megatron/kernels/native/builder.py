"""Builds the library of compiled operations in a temporary folder, with parallel compilers, then moves the result.

There is no lock: a killed build leaves the previous library, and a temporary folder that a later build removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.errors import ConfigError, LaunchError, StorageError
from megatron.files.replacing import move
from megatron.kernels.native.choosing import PARTS
from megatron.kernels.native.compilers import EXACT_OPERATIONS, Toolchain, find_toolchain
from megatron.kernels.native.library import (
    FOLDER_VARIABLE,
    INTERFACE,
    LIBRARY,
    RECORD,
    SOURCES,
    Library,
    default_folder,
    digest_of,
    digest_of_sources,
)
from megatron.processor import cpu_features

Report = Callable[[str], object]
_SHOWN_LINES = 20  # of a failed compiler's output
_SCRATCH, _FORGOTTEN_SECONDS = "build-", 24 * 3600


@dataclass(frozen=True)
class BuildRequest:
    """The settings of a build.

    Attributes:
        folder: the output folder; None for the package.
        only: operations to build; all if empty.
        cuda: `yes`, `no` or `auto`.
        architectures: compute capabilities of GPUs, such as "90".
        jobs: parallel compilers; None for one per core.
        seconds: time limit of the build.
        native: build for the CPU of this machine only, which is three times as fast.
        sources: the folder csrc/ops; None for this checkout.
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
        ConfigError: an unknown operation or architecture, or no sources.
        LaunchError: a compiler is missing, fails, or takes too long.
        StorageError: the folder cannot be written.
    """
    sources = request.sources or SOURCES
    operations = _operations(sources, request.only)
    tools = find_toolchain(request.cuda, request.architectures, native=request.native)
    target = request.folder or default_folder()
    devices = f"CPU and CUDA sm_{', sm_'.join(tools.architectures)}" if tools.nvcc else "CPU"
    report(f"building {len(operations)} operation(s) for {devices}: {', '.join(operations)}")
    started_at = time.monotonic()
    try:
        target.mkdir(parents=True, exist_ok=True)
        _remove_remains(target)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target, ignore_cleanup_errors=True) as name:
            _build_in(Path(name), sources, operations, tools, request, report)
            _put_in_place(Path(name), target)
    except OSError as failure:
        raise StorageError(
            f"Cannot write the library to {target}: {failure.strerror or failure}. Free space, or choose another "
            f"folder with --output FOLDER and set {FOLDER_VARIABLE}=FOLDER for runs."
        ) from None
    report(f"built {target / LIBRARY} in {time.monotonic() - started_at:.0f} s")
    return target


def _build_in(
    folder: Path,
    sources: Path,
    operations: Sequence[str],
    tools: Toolchain,
    request: BuildRequest,
    report: Report,
) -> None:
    built_from = digest_of_sources(sources)  # before compiling: a file edited meanwhile makes the library outdated
    runner = _Runner(request.jobs or os.cpu_count() or 1, request.seconds, report, can_be_fewer=len(operations) > 1)
    objects: list[Path] = []
    commands: list[tuple[str, list[str]]] = []
    shared = _host_units(sources, operations, runner.jobs)
    units = [(f"{', '.join(names)} for the CPU", names, "{0}/{0}.cpp") for names in shared]
    with_gradients = [name for name in operations if (sources / name / "autograd.cpp").is_file()]
    if with_gradients:
        units.append((f"gradients of {', '.join(with_gradients)}", with_gradients, "{0}/autograd.cpp"))
    for title, names, file in units:
        source = folder / f"{'+'.join(names)}-{len(objects)}.cpp"
        source.write_text("".join(f'#include "{file.format(name)}"\n' for name in names))
        objects.append(source.with_suffix(".o"))
        command = tools.compile_host(sources, source, objects[-1], is_exact=names[0] in EXACT_OPERATIONS)
        commands.append((title, command))
    for name in operations if tools.nvcc is not None else ():
        source, result = sources / name / f"{name}.cu", folder / f"{name}.cu.o"
        if source.is_file():
            command = tools.compile_device(sources, source, result, is_exact=name in EXACT_OPERATIONS)
            commands.append((f"{name} for GPUs", command))
            objects.append(result)
    runner.run_all(commands)
    runner.run_all([(LIBRARY, tools.link(objects, folder / LIBRARY))])
    record = Library(
        folder,
        interface=INTERFACE,
        torch_version=torch.__version__,
        machine=platform.machine(),
        digest=digest_of(folder / LIBRARY),
        sources=built_from,
        operations=tuple(operations),
        architectures=tuple(int(code) for code in tools.architectures) if tools.nvcc else (),
        cpu_features=tuple(sorted(cpu_features())) if request.native else (),
    )
    (folder / RECORD).write_text(json.dumps(record.to_json(), indent=2) + "\n", "utf-8")


def _put_in_place(folder: Path, target: Path) -> None:
    """Replaces an older library. Library and record may be moved in any order: a mismatched pair is not loaded."""
    for part in (LIBRARY, RECORD):
        move(folder / part, target / part)


def _remove_remains(target: Path) -> None:
    for path in target.glob(f"{_SCRATCH}*"):
        if time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _operations(sources: Path, only: Sequence[str]) -> list[str]:
    known = sorted(path.name for path in sources.glob("*/") if (path / f"{path.name}.cpp").is_file())
    if not known:
        raise ConfigError(
            f"No kernel sources in {sources}. They are part of the repository, not of an installed package: clone it "
            "and build there."
        )
    requested = {part for names in only for name in names.split(",") for part in PARTS.get(name, (name,))}
    unknown = sorted(requested - set(known))
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)}: unknown operation. Choose from {', '.join(known)}.")
    return [name for name in known if not requested or name in requested]


def _host_units(sources: Path, operations: Sequence[str], jobs: int) -> list[list[str]]:
    """Groups the operations into translation units for the CPU.

    Parsing torch's headers takes as long as compiling an operation, so there is one unit per parallel compiler: one for
    the operations with special flags, and the others of about equal size.
    """
    sizes = {name: (sources / name / f"{name}.cpp").stat().st_size for name in operations}
    units: list[list[str]] = [[] for _ in range(max(1, jobs - 1))]
    for name in sorted(sizes.keys() - EXACT_OPERATIONS, key=lambda name: (-sizes[name], name)):
        min(units, key=lambda unit: sum(sizes[member] for member in unit)).append(name)
    units.append([name for name in operations if name in EXACT_OPERATIONS])
    return [unit for unit in units if unit]


class _Runner:
    """Runs commands in parallel until one fails, time is up, or the program is interrupted."""

    def __init__(self, jobs: int, seconds: int, report: Report, *, can_be_fewer: bool) -> None:
        self.jobs, self._limit, self._ends_at = jobs, seconds, time.monotonic() + seconds
        self._report, self._can_be_fewer = report, can_be_fewer
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = threading.Event()

    def run_all(self, commands: Sequence[tuple[str, list[str]]]) -> None:
        """Runs named commands.

        Raises:
            LaunchError: a command failed; running ones are terminated, and the others are not started.
        """
        pool = ThreadPoolExecutor(self.jobs)
        pending: dict[Future[float], str] = {pool.submit(self._run, *command): command[0] for command in commands}
        try:
            for count, future in enumerate(as_completed(pending), 1):
                self._report(f"[{count}/{len(commands)}] {pending[future]}: {future.result():.0f} s")
        finally:
            if any(not future.done() for future in pending):
                self._is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                _end(process)
            pool.shutdown()

    def _run(self, name: str, command: list[str]) -> float:
        started_at = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # to terminate the compiler's children with it
            )
        except OSError as failure:
            raise LaunchError(f"Cannot start {command[0]}: {failure.strerror}. Check CXX and CUDA_HOME.") from None
        self._running.add(process)
        if self._is_over.is_set():
            _end(process)
        try:
            output, _ = process.communicate(timeout=max(0.1, self._ends_at - started_at))
        except subprocess.TimeoutExpired:
            fewer = ", or build fewer operations: --only NAME" if self._can_be_fewer else ""
            raise LaunchError(
                f"The build took longer than {self._limit} s (--time-limit {self._limit}) and was stopped while it "
                f"compiled {name}. Raise the limit{fewer}."
            ) from None
        self._running.discard(process)
        if process.returncode:
            lines = output.strip().splitlines()[:_SHOWN_LINES] or [f"{command[0]} printed nothing"]
            raise LaunchError(
                f"Compiling {name} failed (exit status {process.returncode}):\n"
                + "\n".join(lines)
                + f"\nThe command was: {shlex.join(command)}"
            )
        return time.monotonic() - started_at


def _end(process: subprocess.Popen[str]) -> None:
    """Terminates a compiler and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

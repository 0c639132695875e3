"""Runs fuzz cases in child processes: hostile files are refused with a clear error, or are harmless.

Each child reports the number of a case before it runs it, so a signal or a hang is attributed to its case and the other
cases continue; the parent reads no hostile byte. A case may take five seconds of processor time and 256 MB plus twice
its input. It must raise a `MegatronError` that names the file and the position, or accept the files and obey the rules
that its target checks.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns.campaign import Plan, Result
from campaigns.fuzzing.mutations import Files
from campaigns.fuzzing.target import Broken, Target
from megatron import log
from megatron.errors import MegatronError

CASES_PER_CHILD = 50
CPU_SECONDS = 5.0  # twice what the costliest case takes on a machine with other work
WALL_SECONDS = 120.0
MEMORY_BYTES = 256 << 20
ADDRESS_SPACE_BYTES = 6 << 30


@dataclass(frozen=True)
class Kit:
    """The parts of a fuzz campaign.

    Args:
        write: writes the undamaged files into a folder.
        load: loads what all cases share, before their processes are forked.
    """

    targets: Sequence[Target]
    write: Callable[[Path], None]
    load: Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """A target and its mutated files."""

    target: Target
    mutation: str
    files: Files
    draw: Random

    @property
    def kind(self) -> str:
        """The row of the case in the summary."""
        return f"{self.target.name}: {self.mutation}"


class Cases:
    """Makes cases from their numbers.

    Args:
        undamaged: the folder of the undamaged files.
        targets: the targets to draw from, if their files exist.
    """

    def __init__(self, undamaged: Path, plan: Plan, targets: Sequence[Target]) -> None:
        self.undamaged = undamaged
        self._plan = plan
        names = plan.names([target.name for target in targets])
        self._targets = [target for target in targets if target.name in names and self._has(target)]
        self._files: dict[str, bytes] = {}

    def __getitem__(self, number: int) -> Case:
        draw = self._plan.random(number)
        (target,) = draw.choices(self._targets, [target.share for target in self._targets])
        files = self._undamaged_files(draw.choice(target.files))
        names = sorted(target.mutations)
        name = draw.choice(names)
        files = target.mutations[name](draw, files)
        if draw.random() < 0.1 and files:
            try:
                files = target.mutations[draw.choice(names)](draw, files)
                name = "two of these"
            except Exception:  # the first one left nothing that it could damage
                pass
        return Case(target, name, files, draw)

    def _has(self, target: Target) -> bool:
        return all((self.undamaged / name).exists() for names in target.files for name in names)

    def _undamaged_files(self, names: tuple[str, ...]) -> Files:
        files = {}
        for name in names:
            path = self.undamaged / name
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                if not file.name.startswith("."):
                    if str(file) not in self._files:
                        self._files[str(file)] = file.read_bytes()
                    files[file.name] = self._files[str(file)]
        return files


def run_case(cases: Cases, number: int, folder: Path, on_start: Callable[[], object] = lambda: None) -> Result:
    """Runs one case in this process.

    Args:
        on_start: called after the case is made, which may take seconds, and before it is read.
    """
    case = cases[number]
    on_start()
    case_folder = folder / "case"
    shutil.rmtree(case_folder, ignore_errors=True)
    case_folder.mkdir()
    for name, data in case.files.items():
        (case_folder / name).write_bytes(data)
    held_bytes, started = reset_peak(), time.process_time()
    outcome, problem = _outcome(case, case_folder, cases.undamaged)
    seconds, grown_bytes = time.process_time() - started, max(0, memory_peak() - held_bytes)
    allowed_bytes = MEMORY_BYTES + 2 * sum(map(len, case.files.values()))
    if not problem and seconds > CPU_SECONDS:
        problem = f"{outcome} after {seconds:.1f} s of processor time"
    if not problem and grown_bytes > allowed_bytes:
        problem = f"{outcome} with {grown_bytes / 1e6:.0f} MB, {allowed_bytes / 1e6:.0f} are allowed"
    return Result(number, case.kind, outcome, problem, seconds)


def _outcome(case: Case, folder: Path, undamaged: Path) -> tuple[str, str]:
    """The outcome, and the problem with it if any."""
    try:
        case.target.read(folder, undamaged, case.draw)
    except Broken as failure:
        return "accepted", f"accepted, but {failure}"
    except MegatronError as failure:
        return "refused", _refusal_problem(case.target, str(failure))
    except BaseException:  # of whatever kind: that is what the campaign looks for
        return "refused", f"refused with a foreign exception:\n{traceback.format_exc()}"
    return "accepted", ""


def _refusal_problem(target: Target, text: str) -> str:
    if not re.search(target.names, text):
        return f"refused without naming the file: {text}"
    if not re.search(target.position, text):
        return f"refused without naming the position: {text}"
    if len(text) > target.longest_letters:
        return f"refused in {len(text)} letters: {text[:300]}"
    return ""


def reset_peak() -> int:
    """Resets the peak of this process's memory if the system supports it; returns the bytes in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return memory_peak()
    return _memory_bytes("VmRSS")


def memory_peak() -> int:
    try:
        return _memory_bytes("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _memory_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(name)
    return int(found.group(1)) << 10


# --- processes ------------------------------------------------------------------------------------


class Lane:
    """A sequence of child processes that work through the numbers of a plan.

    Args:
        numbers: shared by all lanes.
        folder: for the files of this lane's cases.
    """

    def __init__(self, cases: Cases, numbers: Iterator[int], folder: Path) -> None:
        self._cases, self._numbers, self._folder = cases, numbers, folder
        self._pending: list[int] = []
        folder.mkdir(exist_ok=True)
        self._start()

    @property
    def is_done(self) -> bool:
        """True if no case is left."""
        return self.descriptor < 0

    def _start(self) -> None:
        if not self._pending:
            self._pending = [number for _, number in zip(range(CASES_PER_CHILD), self._numbers, strict=False)]
        self.descriptor, self._buffer = -1, b""
        if not self._pending:
            return
        self.descriptor, writer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self.descriptor)
            _run_child(self._cases, self._pending, self._folder, writer)
        os.close(writer)
        self._running, self._started_at, self._cpu_at_start = self._pending[0], time.monotonic(), 0.0

    def receive(self) -> Iterator[Result]:
        """Reads the child's messages; yields the results."""
        data = os.read(self.descriptor, 1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "start" in message:
                self._running, self._started_at = message["start"], time.monotonic()
                self._cpu_at_start = _cpu_seconds(self._child)
            else:
                result = Result(**message)
                self._pending.remove(result.number)
                yield result
        if not data:
            yield from self._end("")

    def watch(self) -> Iterator[Result]:
        """Kills a child whose case takes too long; yields the case's result."""
        cpu, wall = _cpu_seconds(self._child) - self._cpu_at_start, time.monotonic() - self._started_at
        if cpu > 2 * CPU_SECONDS or wall > WALL_SECONDS:
            os.kill(self._child, signal.SIGKILL)
            yield from self._end(f"hangs: {cpu:.1f} s of processor time, {wall:.0f} s in all")

    def _end(self, problem: str) -> Iterator[Result]:
        os.close(self.descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if self._running in self._pending:
            problem = problem or (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
            self._pending.remove(self._running)
            yield Result(self._running, self._cases[self._running].kind, "ended", problem)
        self._start()


def _run_child(cases: Cases, numbers: list[int], folder: Path, writer: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        limit = _memory_bytes("VmSize") + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            on_start = functools.partial(_send, writer, {"start": number})
            _send(writer, vars(run_case(cases, number, folder, on_start)))
    finally:
        os._exit(0)


def _send(writer: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _cpu_seconds(process_id: int) -> float:
    """Processor time of a process and its threads."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(kit: Kit, plan: Plan) -> Iterator[Result]:
    """Runs the cases of a plan; a single one in this process, where a debugger sees it."""
    cases = prepare(kit, plan)
    if plan.case is not None:
        yield run_case(cases, plan.case, plan.folder)
        return
    numbers = iter(plan.numbers)
    lanes = [Lane(cases, numbers, plan.folder / f"lane{lane}") for lane in range(plan.jobs)]
    while lanes := [lane for lane in lanes if not lane.is_done]:
        readable, _, _ = select.select([lane.descriptor for lane in lanes], [], [], 0.25)
        for lane in lanes:
            yield from lane.receive() if lane.descriptor in readable else lane.watch()


def prepare(kit: Kit, plan: Plan) -> Cases:
    """Writes the undamaged files, in a child since libraries start threads, and loads what all cases share."""
    undamaged = plan.folder / "undamaged"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            undamaged.mkdir()
            kit.write(undamaged)
            code = 0
        except BaseException:
            log.error(traceback.format_exc())
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError("the undamaged files could not be written")
    kit.load(undamaged)
    return Cases(undamaged, plan, kit.targets)

"""Fuzzes everything on the data side that reads files: damaged and hostile ones are refused in words, or harmless.

    python -m tests.reliability.fuzzing.fuzz --cases 100000 --seed 1 --jobs 2
    python -m tests.reliability.fuzzing.fuzz --seed 1 --case 1234        plays one case again, in this process

Every case runs in a child process that says its number first, so that a signal or a hang has a culprit and the others
go on; this process reads no hostile byte. A case must end within two seconds of processor time, take at most 256 MB and
twice its input, and be refused by a `MegatronError` that names the file and the place, or accepted with ids that are in
the vocabulary.
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
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from megatron import log, process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import MegatronError
from tests.reliability.fuzzing.fuzz_files import write_undamaged
from tests.reliability.fuzzing.fuzz_targets import TARGETS, Broken, Target, load_before_fork, write_derived
from tests.reliability.fuzzing.mutations import Files

CASES_PER_CHILD = 50
CPU_SECONDS = 2.0
WALL_SECONDS = 120.0
MEMORY_BYTES = 256 << 20
ADDRESS_SPACE_BYTES = 6 << 30


@dataclass(frozen=True)
class FuzzFlags(ConfigSection):
    """How much is fuzzed, and from which seed."""

    cases: int = flag(2000, "how many cases are run", at_least=1)
    seed: int = flag(1, "the same seed and number give the same case", at_least=0)
    case: int | None = flag(None, "only this case, in this process and with its traceback", at_least=0)
    jobs: int = flag(1, "processes that run cases at the same time", at_least=1)
    target: str | None = flag(None, "only the targets whose name contains this")
    report: str | None = flag(None, "file for the table and the failures, as JSON")


@dataclass
class Tally:
    """What became of the cases of one target and mutation."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    longest_seconds: float = 0.0
    most_bytes: int = 0


@dataclass
class Fuzzing:
    """The state of a run: what was counted, and every failure in words."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def count(self, answer: dict[str, Any]) -> None:
        """Takes in what became of a case."""
        tally = self.tallies.setdefault((answer["target"], answer["mutation"]), Tally())
        tally.cases += 1
        tally.longest_seconds = max(tally.longest_seconds, answer["seconds"])
        tally.most_bytes = max(tally.most_bytes, answer["bytes"])
        setattr(tally, answer["became"], getattr(tally, answer["became"]) + 1)
        if answer["became"] == "failed":
            self.failures.append(answer)

    def table(self) -> list[str]:
        """The counts as lines of text, one a target and mutation, with a sum."""
        form = "{:<24} {:<28} {:>7} {:>9} {:>8} {:>8} {:>8} {:>7}"
        lines = [form.format("target", "mutation", "cases", "accepted", "refused", "failures", "cpu s", "MB")]
        total = Tally()
        for (target, mutation), tally in sorted(self.tallies.items()):
            lines.append(_row(form, target, mutation, tally))
            for name in ("cases", "accepted", "refused", "failed"):
                setattr(total, name, getattr(total, name) + getattr(tally, name))
            total.longest_seconds = max(total.longest_seconds, tally.longest_seconds)
            total.most_bytes = max(total.most_bytes, tally.most_bytes)
        return [*lines, _row(form, "all", "", total)]


def _row(form: str, target: str, mutation: str, tally: Tally) -> str:
    return form.format(
        target,
        mutation,
        tally.cases,
        tally.accepted,
        tally.refused,
        tally.failed,
        f"{tally.longest_seconds:.2f}",
        f"{tally.most_bytes / 1e6:.0f}",
    )


def _write_data_files(undamaged: Path) -> None:
    write_undamaged(undamaged)
    write_derived(undamaged)


@dataclass(frozen=True)
class Kit:
    """What one campaign fuzzes.

    Args:
        write: writes the undamaged files into a folder.
        load: makes what all cases share, before their processes are forked.
    """

    targets: Sequence[Target] = TARGETS
    write: Callable[[Path], None] = _write_data_files
    load: Callable[[Path], None] = load_before_fork
    program: str = "tests.reliability.fuzzing.fuzz"


@dataclass(frozen=True)
class Case:
    """What a number stands for."""

    target: Target
    mutation: str
    files: Files
    draw: Random


class Cases:
    """Makes cases from their numbers.

    Args:
        undamaged: folder of the files they begin with.
        only: the targets whose name contains this.
    """

    def __init__(
        self, undamaged: Path, seed: int, only: str | None = None, targets: Sequence[Target] = TARGETS
    ) -> None:
        self.undamaged = undamaged
        self._seed = seed
        self._targets = [target for target in targets if (only or "") in target.name and self._has(target)]
        self._files: dict[str, bytes] = {}

    def __getitem__(self, number: int) -> Case:
        draw = Random(f"case {number} of seed {self._seed}")
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
        found = {}
        for name in names:
            path = self.undamaged / name
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                if not file.name.startswith("."):
                    if str(file) not in self._files:
                        self._files[str(file)] = file.read_bytes()
                    found[file.name] = self._files[str(file)]
        return found


def run_case(cases: Cases, number: int, folder: Path, begin: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Runs one case in this process and says what became of it.

    Args:
        begin: called when the case is made, which may take seconds, and is read next.
    """
    case = cases[number]
    begin()
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, data in case.files.items():
        (place / name).write_bytes(data)
    held, started = reset_peak(), time.process_time()
    became, text = _outcome(case, place, cases.undamaged)
    seconds, grown = time.process_time() - started, max(0, memory_peak() - held)
    allowed = MEMORY_BYTES + 2 * sum(map(len, case.files.values()))
    if became != "failed" and seconds > CPU_SECONDS:
        became, text = "failed", f"took {seconds:.1f} s of processor time: {text}"
    if became != "failed" and grown > allowed:
        became, text = "failed", f"took {grown / 1e6:.0f} MB, {allowed / 1e6:.0f} are allowed: {text}"
    return {
        "case": number, "target": case.target.name, "mutation": case.mutation, "became": became, "text": text,
        "seconds": seconds, "bytes": grown,
    }  # fmt: skip


def _outcome(case: Case, place: Path, undamaged: Path) -> tuple[str, str]:
    try:
        case.target.read(place, undamaged, case.draw)
    except Broken as failure:
        return "failed", f"accepted, but {failure}"
    except MegatronError as failure:
        text = str(failure)
        if not re.search(case.target.names, text):
            return "failed", f"refused without naming the file: {text}"
        if not re.search(case.target.position, text):
            return "failed", f"refused without naming the place: {text}"
        if len(text) > case.target.longest_letters:
            return "failed", f"refused in {len(text)} letters: {text[:300]}"
        return "refused", text
    except BaseException:  # of whatever kind: that is what is looked for
        return "failed", f"refused by an error that is not the project's:\n{traceback.format_exc()}"
    return "accepted", ""


def reset_peak() -> int:
    """Sets the peak of this process's memory to what it holds now, where the system can; returns what it holds."""
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
    """A row of children, one after the other, that work through the numbers of a run.

    Args:
        numbers: shared by all lanes.
    """

    def __init__(self, cases: Cases, numbers: Iterator[int], fuzzing: Fuzzing, folder: Path) -> None:
        self._cases, self._numbers, self._fuzzing, self._folder = cases, numbers, fuzzing, folder
        self._left: list[int] = []
        self._start()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.descriptor < 0

    def _start(self) -> None:
        self._left = self._left or [number for _, number in zip(range(CASES_PER_CHILD), self._numbers, strict=False)]
        self.descriptor, self._buffer = -1, b""
        if not self._left:
            return
        self.descriptor, writer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self.descriptor)
            _child(self._cases, self._left, self._folder, writer)
        os.close(writer)
        self._begun, self._begun_at, self._cpu_at_begin = self._left[0], time.monotonic(), 0.0

    def receive(self) -> None:
        """Takes in what the child says, and its end."""
        data = os.read(self.descriptor, 1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "begins" in answer:
                self._begun, self._begun_at = answer["begins"], time.monotonic()
                self._cpu_at_begin = _cpu_seconds(self._child)
            else:
                self._fuzzing.count(answer)
                self._left.remove(answer["case"])
        if not data:
            self._end("")

    def watch(self) -> None:
        """Ends a child whose case takes too long, which is a failure of that case."""
        cpu, wall = _cpu_seconds(self._child) - self._cpu_at_begin, time.monotonic() - self._begun_at
        if cpu > 2 * CPU_SECONDS or wall > WALL_SECONDS:
            os.kill(self._child, signal.SIGKILL)
            self._end(f"hangs: {cpu:.1f} s of processor time, {wall:.0f} s in all, and no end")

    def _end(self, reason: str) -> None:
        os.close(self.descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        if self._left and self._begun in self._left:
            reason = reason or (f"signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")
            self._left.remove(self._begun)
            case = self._cases[self._begun]
            self._fuzzing.count(
                {
                    "case": self._begun, "target": case.target.name, "mutation": case.mutation, "became": "failed",
                    "text": reason, "seconds": 0.0, "bytes": 0,
                }
            )  # fmt: skip
        self._start()


def _child(cases: Cases, numbers: list[int], folder: Path, writer: int) -> None:
    """The body of a child: cases in, answers out."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        limit = _memory_bytes("VmSize") + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            begin = functools.partial(_tell, writer, {"begins": number})
            _tell(writer, run_case(cases, number, folder, begin))
    finally:
        os._exit(0)


def _tell(writer: int, message: dict[str, Any]) -> None:
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


def fuzz(flags: FuzzFlags, kit: Kit) -> Fuzzing:
    """Runs all cases of a run."""
    fuzzing = Fuzzing()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_fast_folder()) as folder:
        cases = prepare(Path(folder), flags, kit)
        numbers = iter(range(flags.cases))
        places = [Path(folder) / f"lane{place}" for place in range(flags.jobs)]
        for place in places:
            place.mkdir()
        lanes = [Lane(cases, numbers, fuzzing, place) for place in places]
        while lanes := [lane for lane in lanes if not lane.is_done]:
            readable, _, _ = select.select([lane.descriptor for lane in lanes], [], [], 0.25)
            for lane in lanes:
                if lane.descriptor in readable:
                    lane.receive()
                else:
                    lane.watch()
    return fuzzing


def prepare(folder: Path, flags: FuzzFlags, kit: Kit) -> Cases:
    """Writes the undamaged files, in a process of its own since libraries start threads, and loads what all share."""
    undamaged = folder / "undamaged"
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
    return Cases(undamaged, flags.seed, flags.target, kit.targets)


def _fast_folder() -> str | None:
    """A folder in memory, where the system has one: cases write and sync many small files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main(kit: Kit = Kit(), description: str = __doc__ or "") -> int:
    """Runs the cases of the command line's flags; 1 if one of them failed."""
    flags = parse_flags(FuzzFlags, sys.argv[1:], prog=f"python -m {kit.program}", description=description)
    if flags.case is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_fast_folder()) as folder:
            cases = prepare(Path(folder), flags, kit)
            answer = run_case(cases, flags.case, Path(folder))
            log.line("\n".join(f"{name}: {value}" for name, value in answer.items()))
        return int(answer["became"] == "failed")
    started_at = time.monotonic()
    fuzzing = fuzz(flags, kit)
    table = fuzzing.table()
    if flags.report:
        Path(flags.report).write_text(json.dumps({"table": table, "failures": fuzzing.failures}, indent=1))
    for text in table:
        log.line(text)
    for failure in fuzzing.failures[:100]:
        log.error(
            f"{failure['target']}, {failure['mutation']}: {failure['text']}\n"
            f"    again: python -m {kit.program} --seed {flags.seed} --case {failure['case']}"
            + (f" --target {flags.target!r}" if flags.target else "")
        )
    log.line(f"{flags.cases} cases of seed {flags.seed}, {time.monotonic() - started_at:.0f} s")
    return int(bool(fuzzing.failures))


if __name__ == "__main__":
    process_exit.exit_with(main)

"""Reads and writes checkpoint directories into which somebody has put a payload.

    python -m tests.reliability.damage.hostile_checkpoints
    python -m tests.reliability.damage.hostile_checkpoints --only 'header'        the payloads whose name contains this

Every payload has a process of its own. What a run or a tool does with a directory of checkpoints is done to it, and
then another checkpoint is saved there. Whatever is loaded is a checkpoint that was saved; everything else ends with an
error of the project. Nothing outside the directory changes, and nothing is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log, process_exit
from megatron.checkpoint import (
    CheckpointLock,
    SaveOptions,
    find,
    load_newest,
    newest_record,
    read_record,
    read_tensors,
    save,
    verify,
)
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import LaunchError, MegatronError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.restarts.identity import identity_of
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.records import make_record
from tests.reliability.damage.hostile_payloads import NEWEST, PAYLOADS, Place
from tests.reliability.fuzzing.fuzz import memory_peak, reset_peak
from trident.checkpoints.summary import summarize, summary_lines

MESH = ParallelMesh.single()
SHAPES: dict[str, tuple[int, ...]] = {"a": (24, 20), "b": (40,)}
STATES = {step: make_state(SHAPES, seed=step) for step in (1, 2, 3)}
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a payload.

    Args:
        wrong: empty if all is well.
        seconds: processor time of the longest step.
        peak_bytes: the most memory that a step took.
        loaded: the step that was loaded, 0 if none was.
        text: what was said of it.
    """

    name: str
    wrong: str
    seconds: float = 0.0
    peak_bytes: int = 0
    loaded: int = 0
    text: str = ""


def write_directory(folder: Path) -> None:
    """Writes a directory of two checkpoints, and one outside it."""
    for step in (1, 2):
        save_step(folder / "run", step)
    (folder / "outside").mkdir()
    (folder / "outside" / "secret").write_bytes(b"nobody's business")
    shutil.copytree(folder / "run" / NEWEST, folder / "outside" / "iter_0000007")


def save_step(directory: Path, step: int) -> None:
    """Saves the state of a step."""
    record = make_record(step).to_json()
    save(directory, step, whole_sink(STATES[step]).expected, record, MESH, SaveOptions(chunk_bytes=1024))


# --- what is done to a directory ------------------------------------------------------------------


class Wrong(Exception):
    """A payload did something."""


def _load(directory: Path) -> int:
    sink = whole_sink(STATES[1])
    found = load_newest(directory, sink.wanted, MESH)
    if found is None:
        raise Wrong("there is nothing to load")
    step = int(found.record["progress"]["step"])
    sink.expected = whole_sink(STATES[step]).expected
    sink.check()
    return step


def _inspect(directory: Path) -> None:
    for line in summary_lines(summarize(OpenCheckpoint.newest(directory), with_moments=True)):
        log.line(line)


def _lock(directory: Path) -> None:
    with CheckpointLock(directory, MESH, heartbeat_seconds=0.01, stale_seconds=0.01):
        return


def _save(directory: Path) -> None:
    save_step(directory, 3)
    if read_record(directory / "iter_0000003")["progress"]["step"] != 3:
        raise Wrong("the new checkpoint is another one")


STEPS: dict[str, Callable[[Path], Any]] = {
    "find": find,
    "newest": lambda directory: newest_record(directory, MESH),
    "load": _load,
    "record": lambda directory: read_record(directory / NEWEST),
    "verify": lambda directory: verify(directory / NEWEST),
    "tensors": lambda directory: dict(read_tensors(directory / NEWEST, kind="master")),
    "inspect": _inspect,
    "identity": identity_of,
    "lock": _lock,
    "save": _save,
    "load again": _load,
}


def use(name: str, place: Place) -> Outcome:
    """Does everything to a directory, in this process."""
    said, texts, wrong, loaded = io.StringIO(), [], [], 0
    longest = 0.0
    held = reset_peak()
    before = _snapshot(place.outside)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        for step, work in STEPS.items():
            began_at = time.process_time()
            try:
                result = work(place.directory)
                loaded = result if step == "load" else loaded
            except MegatronError as failure:
                texts.append(f"{step}: {failure}")
                if step == "save" and not isinstance(failure, StorageError | LaunchError):
                    wrong.append(f"{step}: {failure}")
            except Exception:  # of whatever kind: that is what is looked for
                wrong.append(f"{step}: {traceback.format_exc()}")
            longest = max(longest, time.process_time() - began_at)
    peak = memory_peak() - held
    if place.canary.exists():
        wrong.append("it was executed")
    if _snapshot(place.outside) != before:
        wrong.append("something outside was changed")
    if "\x1b" in said.getvalue():
        wrong.append(f"escapes are shown: {said.getvalue()[:200]!r}")
    return Outcome(name, "\n".join(wrong), longest, peak, loaded, " | ".join(texts))


def _snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted([folder.parent, folder, *folder.rglob("*")]):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else sorted(os.listdir(path))
        known = (status.st_mode, status.st_size, digest)
        found[str(path)] = known if path == folder.parent else (*known, status.st_mtime_ns)
    return found


# --- processes ------------------------------------------------------------------------------------


def _in_child(work: Callable[[], Any], timer: int = signal.ITIMER_REAL) -> Any:
    """Runs something in a forked process and returns what it returns, as JSON; a text if it died.

    Args:
        timer: what `LIMIT_SECONDS` are counted in: of a clock, or of the processor.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.setitimer(timer, LIMIT_SECONDS)
            with os.fdopen(sending, "w") as answer:
                json.dump(work(), answer)
            code = 0
        except BaseException:
            log.error(traceback.format_exc())
        finally:
            os._exit(code)
    os.close(sending)
    with os.fdopen(receiving) as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if code == 0 else f"ended with {code}"


def run(names: Sequence[str] = tuple(PAYLOADS)) -> list[Outcome]:
    """Tries payloads, after a directory without one."""
    outcomes = []
    with tempfile.TemporaryDirectory(
        prefix="hostile-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as top:
        template = Path(top) / "template"
        with contextlib.redirect_stdout(io.StringIO()):
            write_directory(template)
        torch.set_num_threads(1)
        for name in ("nothing", *names):
            folder = Path(top) / "case"
            shutil.copytree(template, folder, symlinks=True)
            place = Place(folder / "run", folder / "outside", folder / "outside" / "canary")
            if name != "nothing":
                # Some take a second of the processor, which may be long on a machine with other work.
                making = lambda name=name, place=place: PAYLOADS[name](place)  # type: ignore[misc] # noqa: E731
                made = _in_child(making, signal.ITIMER_PROF)
                if made is not None:
                    raise RuntimeError(f"the payload {name} could not be made: its process {made}")
            became = _in_child(lambda name=name, place=place: vars(use(name, place)))  # type: ignore[misc]
            outcomes.append(Outcome(name, became) if isinstance(became, str) else Outcome(**became))
            shutil.rmtree(folder)
    return outcomes


@dataclass(frozen=True)
class HostileFlags(ConfigSection):
    """Which payloads are tried."""

    only: str = flag("", "the payloads whose name contains this")
    report: str | None = flag(None, "file for the outcomes, as JSON")


def main() -> int:
    """Tries the payloads; 1 if one did something."""
    program = "python -m tests.reliability.damage.hostile_checkpoints"
    flags = parse_flags(HostileFlags, sys.argv[1:], prog=program, description=__doc__ or "")
    outcomes = run([name for name in PAYLOADS if flags.only in name])
    if flags.report:
        Path(flags.report).write_text(json.dumps([vars(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        shown = f"WRONG: {outcome.wrong}" if outcome.wrong else outcome.text[:60]
        cost = f"{outcome.seconds:6.2f} s  {outcome.peak_bytes / 1e6:6.0f} MB"
        log.line(f"{outcome.name:<32} loaded {outcome.loaded}  {cost}  {shown}")
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    longest = max(outcome.seconds for outcome in outcomes)
    most = max(outcome.peak_bytes for outcome in outcomes)
    log.line(f"{len(outcomes) - 1} payloads, {wrong} did something; at most {longest:.2f} s and {most / 1e6:.0f} MB")
    return int(bool(wrong))


if __name__ == "__main__":
    process_exit.exit_with(main)

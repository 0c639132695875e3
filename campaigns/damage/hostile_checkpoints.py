"""Reads and writes checkpoint directories into which somebody has put a payload.

    python -m campaigns.run hostile-checkpoints
    python -m campaigns.run hostile-checkpoints --only header        the payloads whose name contains this

Every payload has its own process. What a run or a tool does with a directory of checkpoints is done to it, and
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
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from campaigns.campaign import Plan, Result
from campaigns.damage.hostile_payloads import NEWEST, PAYLOADS, Place
from campaigns.fuzzing.fuzzer import memory_peak, reset_peak
from megatron import log
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
from megatron.errors import LaunchError, MegatronError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.restarts.identity import identity_of
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.records import make_record
from trident.checkpoints.summary import summarize, summary_lines

MESH = ParallelMesh.single()
SHAPES: dict[str, tuple[int, ...]] = {"a": (24, 20), "b": (40,)}
STATES = {step: make_state(SHAPES, seed=step) for step in (1, 2, 3)}
LIMIT_SECONDS = 60.0
NOTHING = "nothing"
NEWEST_STEP = 2
# The payloads next to the newest checkpoint and make no difference.
BESIDE = (
    "step link to", "step file", "step FIFO", "step aside", "step temporary", "step trash", "hint", "lock", "run.json",
    "pickle model", "pickle protocol", "pickle torch", "pickle .", "pickle as hint", "pickle as lock",
    "pickle as run.json", "pickle as history", "modules", "package", "auto_map", "crowd", "name with",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a payload.

    Args:
        wrong: empty if all is well.
        seconds: processor time of the longest step.
        peak_bytes: the most memory that a step took.
        loaded: the step that was loaded, 0 if none was.
        text: the messages about it.
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


# --- steps --------------------------------------------------------------------------------------


class Wrong(Exception):
    """A payload did something."""


def _load(directory: Path) -> int:
    sink = whole_sink(STATES[1])
    found = load_newest(directory, sink.wanted, MESH)
    if found is None:
        raise Wrong("nothing to load")
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
    """Runs all steps on a directory, in this process."""
    output, texts, wrong, loaded = io.StringIO(), [], [], 0
    longest = 0.0
    held = reset_peak()
    before = _snapshot(place.outside)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
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
    if "\x1b" in output.getvalue():
        wrong.append(f"escapes are shown: {output.getvalue()[:200]!r}")
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


def run(name: str, template: Path, folder: Path) -> Outcome:
    """Tries one payload in a copy of the template; `NOTHING` is the template itself."""
    shutil.copytree(template, folder, symlinks=True)
    place = Place(folder / "run", folder / "outside", folder / "outside" / "canary")
    if name != NOTHING:
        # Some take a second of the processor, which may be long on a machine with other work.
        made = _in_child(lambda: PAYLOADS[name](place), signal.ITIMER_PROF)
        if made is not None:
            raise RuntimeError(f"the payload {name} could not be made: its process {made}")
    outcome = _in_child(lambda: vars(use(name, place)))
    shutil.rmtree(folder)
    return Outcome(name, outcome) if isinstance(outcome, str) else Outcome(**outcome)


def problem_of(outcome: Outcome) -> str:
    """The problem of an outcome, empty if none; the limits are many times what the payloads take."""
    expected = NEWEST_STEP if outcome.name == NOTHING or leaves_the_newest(outcome.name) else NEWEST_STEP - 1
    if outcome.wrong:
        return outcome.wrong
    if outcome.loaded != expected:
        return f"step {outcome.loaded} was loaded instead of {expected}: {outcome.text}"
    if outcome.seconds > 20 or outcome.peak_bytes > 512 << 20:
        return f"it took {outcome.seconds:.1f} s and {outcome.peak_bytes / 1e6:.0f} MB"
    return ""


def leaves_the_newest(name: str) -> bool:
    """True if a payload is next to the newest checkpoint and must make no difference."""
    return name.startswith(BESIDE) or name == "zip slip"


def run_cases(plan: Plan) -> Iterator[Result]:
    """Tries a folder without a payload, then payloads in a random order."""
    template = plan.folder / "template"
    with contextlib.redirect_stdout(io.StringIO()):
        write_directory(template)
    torch.set_num_threads(1)
    names = plan.names(list(PAYLOADS))
    names = [NOTHING, *Random(plan.seed).sample(names, len(names))]
    for number in plan.numbers[: len(names)]:
        outcome = run(names[number % len(names)], template, plan.folder / "case")
        kind = "beside the newest" if leaves_the_newest(outcome.name) else "in the newest"
        kind = NOTHING if outcome.name == NOTHING else kind
        problem = problem_of(outcome)
        problem = problem and f"{outcome.name}: {problem}"
        yield Result(number, kind, f"loaded step {outcome.loaded}", problem, outcome.seconds)

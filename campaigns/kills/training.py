"""SIGKILL at random moments and at all file operations of saves: `python -m campaigns.run kills --cases 200`.

In each case a run that saves in the background loses a rank, all ranks, its launcher or everything at once. Half of the
kills come at a moment drawn between start and end, half at one of the operations on files of which a save consists. No
committed checkpoint may be lost or damaged and no process may stay; the same command then continues to the end, with
the metrics and the last checkpoint of an undisturbed run, and leaves no temporary folder behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from campaigns.campaign import Plan, Result
from megatron.checkpoint import verify
from megatron.errors import MegatronError
from megatron.observe.metrics_file import read_steps
from megatron.parallel.processes import born_at
from tests.checkpoint.retention.checkpoints import steps
from tests.helpers.ranks import fork_server_context, free_port
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus

STEPS, SAVE_INTERVAL = 12, 3
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "dp2-zero2": (2, {"zero_stage": 2, "bf16": ()}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "num_layers": 4, "zero_stage": 0}),
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2dp2": (4, {"tensor_model_parallel_size": 2}),
    "ep2": (2, {"num_experts": 4, "expert_model_parallel_size": 2, "moe_router_enable_expert_bias": ()}),
    "ring2": (2, {"context_parallel_size": 2}),
    "ulysses2": (2, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "dp2-muon": (2, {"optimizer": "muon"}),
    "tp2-schedule-free": (
        2,
        {"optimizer": "schedule-free", "lr_decay_style": "constant", "tensor_model_parallel_size": 2},
    ),
    "pp2-muon": (2, {"pipeline_model_parallel_size": 2, "optimizer": "muon", "zero_stage": 0}),
    "dp2-zero3-ring2": (4, {"zero_stage": 3, "context_parallel_size": 2}),
}
_LIMIT_SECONDS = 120.0
_COMPARED = ("lm_loss", "learning_rate", "gradient_norm", "consumed_samples", "consumed_tokens", "skipped_iterations")


@dataclass(frozen=True)
class Fault:
    """A rank dies at an operation on files.

    Args:
        operation: a name as `_name_of` gives it; the `place`-th of that name, from 1.
        moment: before the operation, after it, or in the middle of a write.
        takes_all: the launcher and all ranks die with it.
        slow_seconds: how long each write takes, so that saves last while training continues.
    """

    rank: int = -1
    operation: str = ""
    place: int = 0
    moment: str = "before"
    takes_all: bool = False
    slow_seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A kill: at a fault, or `after_seconds` of a run with victims "rank", "ranks", "launcher" or "all"."""

    layout: str
    fault: Fault
    after_seconds: float | None = None
    victims: str = ""
    keep_last: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Args:
        was_killed: True if the kill came before the end of the run.
        reported_step: the last step that the run had reported; 0 before the first.
        saved_step: the newest checkpoint then.
        seconds: from the first death to that of the last process.
    """

    case: Case
    was_killed: bool = False
    reported_step: int = 0
    saved_step: int = 0
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a layout."""

    seconds: float
    metrics: Mapping[int, tuple[Any, ...]]
    files: Mapping[str, bytes]
    operations: Sequence[Mapping[str, int]]


def flags_of(corpus: TinyCorpus, folder: Path, case: Case) -> list[str]:
    """The command line of a run that saves and evaluates now and then."""
    layout = dict(LAYOUTS[case.layout][1])
    return corpus.flags(
        "--async-save",
        folder=folder,
        train_iters=STEPS,
        save_interval=SAVE_INTERVAL,
        eval_interval=5,
        hidden_dropout=0.1,
        attention_dropout=0,
        keep_last=case.keep_last,
        data_cache_path=folder / "cache",
        **layout,
    )


class Attempt:
    """A launcher with its ranks, forked from a process that has imported everything."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str], world_size: int, fault: Fault) -> None:
        self._outputs = [folder / f"out{number}.{rank}" for rank in range(world_size)]
        self._counts = [folder / f"operations{number}.{rank}" for rank in range(world_size)]
        ours, theirs = fork_server_context().Pipe()
        texts = [str(path) for path in self._outputs], [str(path) for path in self._counts]
        self.launcher = fork_server_context().Process(target=_launch, args=(theirs, list(flags), *texts, fault))
        self.launcher.start()
        theirs.close()
        self.ranks: list[int] = ours.recv()
        ours.close()

    def kill(self, victims: str, drawn: random.Random) -> None:
        """Kills some of the processes, if they still run."""
        launcher = [] if self.launcher.pid is None else [self.launcher.pid]
        chosen = {
            "rank": [drawn.choice(self.ranks)],
            "ranks": self.ranks,
            "launcher": launcher,
            "all": [*launcher, *self.ranks],
        }[victims]
        for process in chosen:
            if born_at(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def wait(self) -> tuple[int, list[int]]:
        """Waits for all processes; the launcher's exit code, and the ranks that had to be killed."""
        self.launcher.join(_LIMIT_SECONDS)
        deadline = time.monotonic() + 60
        while any(map(born_at, self.ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        left = [rank for rank in self.ranks if born_at(rank)]
        if self.launcher.exitcode is None:
            self.launcher.kill()
            left = [*left, self.launcher.pid or 0]
        for rank in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        self.launcher.join()
        return self.launcher.exitcode or 0, left

    def text(self) -> str:
        """All that the ranks printed."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs if path.exists())

    def operations(self) -> list[dict[str, int]]:
        """The number of operations on checkpoint files, by rank and kind."""
        return [json.loads(path.read_text()) for path in self._counts]


def _launch(pipe: Connection, flags: list[str], outputs: list[str], counts: list[str], fault: Fault) -> None:
    """Starts the ranks as torchrun does, ends all when one ends by an error, and leaves with the first exit code."""
    os.setpgid(0, 0)
    shared = {
        "WORLD_SIZE": str(len(outputs)),
        "LOCAL_WORLD_SIZE": str(len(outputs)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "killing",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ.update(shared)
    ranks = []
    for rank, output in enumerate(outputs):
        process = os.fork()
        if process == 0:
            pipe.close()
            _become_rank(rank, flags, output, counts[rank], fault)
        ranks.append(process)
    pipe.send(ranks)
    pipe.close()
    code, left = 0, set(ranks)
    while left:
        process, status = os.waitpid(-1, 0)
        left.discard(process)
        ended = os.waitstatus_to_exitcode(status)
        if ended and not code:
            code = ended
            for other in left:
                os.kill(other, signal.SIGTERM)
    os._exit(code & 255)


def _become_rank(rank: int, flags: list[str], output: str, counts: str, fault: Fault) -> NoReturn:
    import torch

    import pretrain_gpt
    from megatron import process_exit

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    counted = _watch_files(fault if fault.rank == rank else replace(fault, place=0))
    code: Any = 1
    try:
        process_exit.exit_with(functools.partial(pretrain_gpt.main, flags))
    except SystemExit as left:
        code = left.code
    Path(counts).write_text(json.dumps(counted))
    os._exit(code or 0)


def _watch_files(fault: Fault) -> Counter[str]:
    """Counts the operations of this process on checkpoints, and dies at one of them."""
    from megatron.checkpoint.storage import Storage

    counted: Counter[str] = Counter()
    names: dict[int, str] = {}

    def die() -> None:
        if fault.takes_all:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(method: str) -> Any:
        original = getattr(Storage, method)

        def call(storage: Storage, first: Any, *rest: Any) -> Any:
            name = _name_of(method, names.get(first, "") if isinstance(first, int) else str((first, *rest)[-1]))
            counted[name] += 1
            is_due = name == fault.operation and counted[name] == fault.place
            if is_due and fault.moment == "before":
                die()
            if is_due and fault.moment == "middle":
                os.write(first, rest[0][: len(rest[0]) // 2])
                die()
            if method == "write":
                time.sleep(fault.slow_seconds)
            result = original(storage, first, *rest)
            if method == "create":
                names[result] = str(first)
            if is_due:
                die()
            return result

        return call

    for method in ("make_directory", "create", "write", "sync", "rename", "remove_tree", "remove_file"):
        setattr(Storage, method, watched(method))
    return counted


def _name_of(method: str, path: str) -> str:
    """The name of an operation: the method and the kind of its file."""
    name = Path(path).name
    kinds = {
        **{"pieces": "pieces", "manifest": "manifest", "latest": "hint", ".tmp-latest": "hint", "iter": "folder"},
        **{".tmp-iter": "temporary folder", ".trash": "deleted folder"},
    }
    kind = next((kind for start, kind in kinds.items() if name.startswith(start)), "other")
    return f"{method} {kind}"


def metrics_of(folder: Path) -> dict[int, tuple[Any, ...]]:
    """The metrics that a run has reported, by step."""
    path = folder / "run" / "metrics.jsonl"
    records = read_steps(path) if path.exists() else {}
    return {step: tuple(record.get(name) for name in _COMPARED) for step, record in records.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint."""
    last = folder / "checkpoints" / f"iter_{STEPS:07d}"
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def reference(corpus: TinyCorpus, folder: Path, layout: str) -> Reference:
    """Runs a layout without a kill."""
    case = Case(layout, Fault(), keep_last=2)
    began_at = time.monotonic()
    attempt = Attempt(folder, 0, flags_of(corpus, folder, case), LAYOUTS[layout][0], case.fault)
    code, left = attempt.wait()
    if code or left:
        raise RuntimeError(f"an undisturbed run ended with {code}, {left}:\n{attempt.text()}")
    return Reference(time.monotonic() - began_at, metrics_of(folder), files_of(folder), attempt.operations())


def draw(layout: str, undisturbed: Reference, drawn: random.Random) -> Case:
    """A case of a layout."""
    slow_seconds = drawn.choice((0.0, 0.001, 0.003))
    if drawn.random() < 0.5:
        keep_last = drawn.choice((None, 2))
        victims = drawn.choices(("rank", "ranks", "launcher", "all"), (60, 20, 12, 8))[0]
        moment = drawn.uniform(0.0, undisturbed.seconds)
        return Case(layout, Fault(slow_seconds=slow_seconds), moment, victims, keep_last)
    rank = drawn.randrange(len(undisturbed.operations))
    operation = drawn.choice(sorted(undisturbed.operations[rank]))
    place = drawn.randint(1, undisturbed.operations[rank][operation])
    moments = ("before", "after", "middle") if operation.startswith("write") else ("before", "after")
    fault = Fault(rank, operation, place, drawn.choice(moments), drawn.random() < 0.3, slow_seconds)
    return Case(layout, fault, keep_last=2)  # as the run whose operations were counted


def run_case(corpus: TinyCorpus, folder: Path, case: Case, undisturbed: Reference, drawn: random.Random) -> Outcome:
    """Kills one run and continues it."""
    folder.mkdir()
    flags, world_size = flags_of(corpus, folder, case), LAYOUTS[case.layout][0]
    attempt = Attempt(folder, 0, flags, world_size, case.fault)
    died_at = time.monotonic()
    if case.after_seconds is not None:
        time.sleep(case.after_seconds)
        died_at = time.monotonic()
        attempt.kill(case.victims, drawn)
    else:
        while all(map(born_at, attempt.ranks)) and attempt.launcher.is_alive():
            died_at = time.monotonic()
            time.sleep(0.002)
    code, left = attempt.wait()
    seconds = time.monotonic() - died_at
    metrics, saved = metrics_of(folder), steps(folder / "checkpoints")
    outcome = Outcome(case, bool(code), max(metrics, default=0), max(saved, default=0), seconds)
    problem = _kill_problem(folder, attempt, left, outcome, undisturbed)
    if not problem:
        again = Attempt(folder, 1, flags, world_size, Fault())
        code, left = again.wait()
        problem = _end_problem(folder, again, code, left, outcome, undisturbed)
    return replace(outcome, problem=problem)


def _kill_problem(folder: Path, attempt: Attempt, left: list[int], outcome: Outcome, undisturbed: Reference) -> str:
    """The problem after a kill; empty if none."""
    text = attempt.text()
    if left:
        return f"processes {left} stayed:\n{text}"
    told = [int(step) for step in re.findall(r"successfully saved checkpoint at iteration +(\d+)", text)]
    if max(told, default=0) > outcome.saved_step:
        return f"the checkpoint of step {max(told)} is lost, {outcome.saved_step} is the newest:\n{text}"
    if outcome.case.keep_last is None and not set(told) <= set(steps(folder / "checkpoints")):
        return f"of the checkpoints of steps {told} only {steps(folder / 'checkpoints')} are there:\n{text}"
    for step in steps(folder / "checkpoints"):
        try:
            verify(folder / "checkpoints" / f"iter_{step:07d}")
        except MegatronError as failure:
            return f"checkpoint {step} is damaged: {failure}"
    if "while the others were in shutdown" in text and STEPS not in metrics_of(folder):
        return f"the verdict on the lost rank is about what the others did after it was lost:\n{text}"
    if outcome.reported_step - outcome.saved_step > 2 * SAVE_INTERVAL:
        return f"step {outcome.reported_step} was reported, and {outcome.saved_step} is saved:\n{text}"
    return "" if _is_part(metrics_of(folder), undisturbed.metrics) else "the metrics before the kill differ"


def _end_problem(
    folder: Path, again: Attempt, code: int, left: list[int], outcome: Outcome, undisturbed: Reference
) -> str:
    """The problem after a restart by the same command; empty if none."""
    text = again.text()
    if code or left:
        return f"the same command ended with {code}, {left}:\n{text}"
    if outcome.saved_step and f"resumed {folder / 'checkpoints'}/iter_{outcome.saved_step:07d}:" not in text:
        return f"the run was not resumed from step {outcome.saved_step}:\n{text}"
    if metrics_of(folder) != undisturbed.metrics:
        return "the metrics differ from those of an undisturbed run"
    if files_of(folder) != undisturbed.files:
        return "the last checkpoint differs from that of an undisturbed run"
    rest = [path.name for path in (folder / "checkpoints").glob(".*") if re.match(r"\.(tmp|old|trash)", path.name)]
    return f"{rest} stayed in the folder of the checkpoints" if rest else ""


def _is_part(metrics: Mapping[int, Any], whole: Mapping[int, Any]) -> bool:
    return all(whole.get(step) == values for step, values in metrics.items())


def run_cases(plan: Plan) -> Iterator[Result]:
    """Runs the cases, in turn over the layouts; `seconds` run from the first death to that of the last process."""
    corpus = write_tiny_corpus(plan.folder)
    layouts = plan.names(list(LAYOUTS))
    references: dict[str, Reference] = {}
    for number in plan.numbers:
        layout, drawn = layouts[number % len(layouts)], plan.random(number)
        if layout not in references:
            (plan.folder / f"alone-{layout}").mkdir()
            references[layout] = reference(corpus, plan.folder / f"alone-{layout}", layout)
        case = draw(layout, references[layout], drawn)
        outcome = run_case(corpus, plan.folder / f"case{number}", case, references[layout], drawn)
        problem = f"{case}: {outcome.problem}" if outcome.problem else ""
        name = f"killed {case.victims or 'at an operation'}" if outcome.was_killed else "finished before the kill"
        yield Result(number, layout, name, problem, outcome.seconds if outcome.was_killed else None)

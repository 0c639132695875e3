"""Evaluates a checkpoint of any layout on tasks, compared with closed-form baselines.

    python tools/evaluate.py --load checkpoints/demo --tasks examples/evaluation/tasks.yaml --output results.json
    python tools/evaluate.py --load checkpoints/demo --task perplexity --data held_out.txt --set stride=32

Kinds of tasks: perplexity, lambada, cloze, multiple_choice, exact_match. Every metric has a standard error. Unigram and
bigram baselines are fitted to --train-data, or to the `train` file of a task. Under torchrun,
--tensor-model-parallel-size and --pipeline-model-parallel-size split the network; the remaining processes divide the
items.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag
from megatron.config.program_flags import parse_over
from megatron.errors import ConfigError, MegatronError

if TYPE_CHECKING:
    from megatron.inference.loaded_model import LoadedModel
    from megatron.parallel.mesh import ParallelMesh
    from trident.evaluate.tasks.task import Task, TaskOptions


@dataclass(frozen=True)
class EvaluateFlags(ConfigSection):
    """Flags of this tool, in addition to the trainer's."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    tasks: str | None = flag(None, "YAML or JSON file of tasks (docs/evaluation.md)", path=PathUse.SMALL_FILE)
    task: str | None = flag(None, "kind of a single task, instead of --tasks")
    data: str | None = flag(None, "data file of --task", path=PathUse.PREFIX)
    set: tuple[str, ...] = flag((), "additional keys of --task, as key=value", nargs="*")
    train_data: str | None = flag(
        None,
        "text, jsonl or token file to fit the unigram and bigram baselines to, for tasks without `train`",
        path=PathUse.PREFIX,
    )
    limit: int | None = flag(None, "evaluate only the first N items of each task", at_least=1)
    output: str | None = flag(None, "JSON file for the results, updated after each task", path=PathUse.NEW_FILE)
    baselines: bool = flag(True, "evaluate closed-form baselines on the same items")

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if (self.tasks is None) == (self.task is None):
            yield "expected either --tasks FILE, or --task KIND with --data FILE."
        if self.tasks is not None and (self.data is not None or self.set):
            yield "--data and --set require --task KIND; with --tasks, write them into the file."
        if self.task is not None and self.data is None:
            yield f"--task {self.task} requires --data FILE."
        for pair in self.set:
            if "=" not in pair:
                yield f"--set {pair} is invalid. Expected key=value, such as --set stride=32."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    request = parse_over(
        EvaluateFlags, sys.argv[1:] if argv is None else argv, "evaluate.py", description=__doc__ or ""
    )
    flags, given = request.flags, request.given
    tasks = _tasks(flags)

    from megatron.files.replacing import check_writable
    from megatron.inference.loaded_model import open_checkpoint
    from megatron.parallel.agreement import run_on_first
    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(request.layout)
    try:
        if flags.output is not None:
            run_on_first(mesh, lambda: check_writable(Path(str(flags.output))))
        loaded = open_checkpoint(flags.load, given, mesh)
        _run(flags, given, tasks, loaded)
    finally:
        close_mesh(mesh)
    return 0


def _tasks(flags: EvaluateFlags) -> list[Task]:
    """The tasks of the file, or the single task of the command line.

    Raises:
        ConfigError: they cannot be used.
    """
    from trident.evaluate.tasks.tasks_file import read_tasks, task_from

    if flags.tasks is not None:
        return read_tasks(flags.tasks)
    description: dict[str, Any] = {"task": flags.task, "data": flags.data}
    for pair in flags.set:
        key, _, value = pair.partition("=")
        if key in description:
            raise ConfigError(f"--set {pair}: the key {key} is given twice.")
        description[key] = _value(value)
    return [task_from(description, Path(), "--task")]


def _value(text: str) -> Any:
    """A value of --set: parsed as JSON if possible, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _run(flags: EvaluateFlags, given: Mapping[str, Any], tasks: Sequence[Task], loaded: LoadedModel) -> None:
    """Runs the tasks, shows their results and writes them.

    Raises:
        MegatronError: the first error of a task, after the others have run.
    """
    from megatron.parallel.agreement import run_on_first
    from trident.evaluate.loaded_scorer import LoadedScorer
    from trident.evaluate.results import EvaluatedTask, result_lines, write_results
    from trident.evaluate.task_runner import run_tasks

    mesh, about = loaded.mesh, _about(flags, loaded)
    scorer = LoadedScorer(loaded, given.get("optim.micro_batch_size", 8))
    outcomes: list[EvaluatedTask] = []
    failures: list[MegatronError] = []
    log.info(f"evaluating {loaded.path}")
    for outcome, failure in run_tasks(
        tasks, scorer, loaded.tokenizer, _options(flags, loaded), flags.limit, shows_progress=mesh.world.rank == 0
    ):
        outcomes.append(outcome)
        for text in result_lines(outcome.result) if outcome.result is not None else ():
            log.line(text)
        if failure is not None:
            failures.append(failure)
            log.info(f"the task {outcome.title} failed; continuing with the next one: {failure}")
        if flags.output is not None:
            run_on_first(mesh, lambda: write_results(Path(str(flags.output)), about, outcomes))
    if flags.output is not None:
        log.info(f"wrote results to {flags.output}")
    if failures:
        raise failures[0]


def _options(flags: EvaluateFlags, loaded: LoadedModel) -> TaskOptions:
    from functools import partial

    from megatron.parallel.agreement import run_on_all
    from trident.evaluate.baselines import Baselines
    from trident.evaluate.completer import LoadedCompleter
    from trident.evaluate.tasks.task import TaskOptions

    train = None if flags.train_data is None else Path(flags.train_data)
    return TaskOptions(
        baselines=Baselines(loaded.tokenizer, train) if flags.baselines else None,
        complete=LoadedCompleter(loaded),
        agree=partial(run_on_all, loaded.mesh),
    )


def _about(flags: EvaluateFlags, loaded: LoadedModel) -> dict[str, Any]:
    """The checkpoint and the settings, for the results file."""
    from dataclasses import asdict

    from megatron.tokenizers.record import TokenizerRecord

    mesh: ParallelMesh = loaded.mesh
    return {
        "checkpoint": {"path": str(loaded.path), "step": loaded.step},
        "model": asdict(loaded.config.model),
        "tokenizer": asdict(TokenizerRecord.of(loaded.tokenizer)),
        "layout": {"ranks": mesh.world.size, "tp": mesh.tp.size, "pp": mesh.pp.size, "dp": mesh.dp.size},
        "seed": loaded.config.random.seed,
        "tasks_file": flags.tasks,
        "train_data": flags.train_data,
        "limit": flags.limit,
    }


if __name__ == "__main__":
    process_exit.exit_with(main)

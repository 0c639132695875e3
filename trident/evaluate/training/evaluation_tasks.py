"""The tasks of --eval-tasks: read and checked before training starts, and measured at every evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ModelConfig
from megatron.errors import ConfigError, DataError
from megatron.parallel.agreement import run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.callback import Callback, CallbackSetup, Evaluation
from megatron.train.run import Run
from trident.evaluate.scoring import Scorer, check_queries
from trident.evaluate.tasks.task import Prepared, ScoredTask, TaskResult, result_of
from trident.evaluate.tasks.tasks_file import read_tasks
from trident.evaluate.training.engine_scorer import EngineScorer


@dataclass(frozen=True)
class TrainingTask:
    """A task with its items, read once."""

    task: ScoredTask
    items: Prepared

    def run(self, scorer: Scorer) -> TaskResult:
        """Measures the network; collective over the ranks of the scorer."""
        measured = self.items.measure(scorer.score(self.items.queries))
        return result_of(self.task, measured, self.items.count, {}, self.items.notes)


class EvaluationTasks(Callback):
    """Runs tasks with every evaluation of the validation split, and reports their metrics."""

    def __init__(self, tasks: Sequence[TrainingTask]) -> None:
        self._tasks = tuple(tasks)

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        config = setup.config
        tasks = open_tasks(config.evaluation.eval_tasks, setup.tokenizer, config.model, setup.mesh)
        return cls(tasks) if tasks else None

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        for task in self._tasks if evaluation.split == "valid" else ():
            run.watch.enter("evaluation", run.progress.step)
            run.report.task(run.progress, evaluation.prefix, task.run(EngineScorer.of(run)))


def open_tasks(
    path: str | None, tokenizer: Tokenizer, model: ModelConfig, mesh: ParallelMesh
) -> tuple[TrainingTask, ...]:
    """Reads the tasks of --eval-tasks and all their files; collective over the mesh.

    Args:
        path: the tasks file; None for no tasks.

    Raises:
        ConfigError: an invalid tasks file, or a task that generates text.
        DataError: a missing or damaged file, or an item that does not fit the network.
    """
    if path is None:
        return ()
    return run_on_all(mesh, lambda: tuple(_prepared(str(path), tokenizer, model)))


def _prepared(path: str, tokenizer: Tokenizer, model: ModelConfig) -> Iterator[TrainingTask]:
    for task in read_tasks(Path(path)):
        if not isinstance(task, ScoredTask):
            raise ConfigError(
                f"the task {task.title} of --eval-tasks {path} generates text, but tasks in training are scored by "
                "probabilities. Remove it from the file, and run it on checkpoints with tools/evaluate.py."
            )
        items = task.prepare(tokenizer, model.max_position_embeddings + 1, None)
        if not items.count:
            raise DataError(f"{task.path}, the data of the task {task.title}, holds no item. Give a file with one.")
        check_queries(items.queries, model.max_position_embeddings + 1, model.vocab_size)
        yield TrainingTask(task, items)

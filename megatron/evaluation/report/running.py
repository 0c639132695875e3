"""Runs tasks one after the other; one that fails does not take the others' results with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron import log
from megatron.errors import MegatronError, PeerLostError
from megatron.evaluation.report.progress import EvaluationProgress
from megatron.evaluation.report.results_file import Outcome
from megatron.evaluation.scoring import Scorer
from megatron.evaluation.tasks.task import Task, TaskOptions, TaskResult
from megatron.tokenizers.tokenizer import Tokenizer


def run_tasks(
    tasks: Sequence[Task],
    scorer: Scorer,
    tokenizer: Tokenizer,
    options: TaskOptions,
    limit: int | None = None,
    *,
    shows_progress: bool = True,
) -> Iterator[tuple[Outcome, MegatronError | None]]:
    """The outcome of each task as soon as it is known, with the error of a task that failed.

    Args:
        shows_progress: for one rank only.

    Raises:
        PeerLostError: another rank is gone, so no further task can run.
    """
    for task in tasks:
        started_at = time.monotonic()
        progress = EvaluationProgress(task.title, log.info, log.terminal_writer()) if shows_progress else None
        result: TaskResult | None = None
        failure: MegatronError | None = None
        try:
            result = task.run(scorer, tokenizer, limit, replace(options, on_progress=progress))
        except PeerLostError:
            raise
        except MegatronError as caught:
            failure = caught
        finally:
            if progress is not None:
                progress.clear()
        seconds = time.monotonic() - started_at
        yield Outcome(task.title, result, None if failure is None else str(failure), seconds), failure

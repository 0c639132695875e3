"""Runs tasks one after the other and shows their progress; a failing task does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tqdm import tqdm

from megatron import log
from megatron.errors import MegatronError, PeerLostError
from megatron.files.progress import ProgressDisplay
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.results import EvaluatedTask
from trident.evaluate.scoring import Scorer
from trident.evaluate.tasks.task import Task, TaskOptions, TaskResult

_LINE_SECONDS = 10.0
_COLUMNS = 100


def run_tasks(
    tasks: Sequence[Task],
    scorer: Scorer,
    tokenizer: Tokenizer,
    options: TaskOptions,
    limit: int | None = None,
    *,
    shows_progress: bool = True,
) -> Iterator[tuple[EvaluatedTask, MegatronError | None]]:
    """Yields the outcome of each task as soon as it is available, with the error of a failed task.

    Args:
        shows_progress: True on one rank only.

    Raises:
        PeerLostError: another rank ended, so no other task can run.
    """
    for task in tasks:
        started_at = time.monotonic()
        progress = EvaluationProgress(task.title, log.info, log.status_line()) if shows_progress else None
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
        yield EvaluatedTask(task.title, result, None if failure is None else str(failure), seconds), failure


class EvaluationProgress(ProgressDisplay):
    """The `Progress` display of one task.

    Args:
        title: title of the task.
        write_line, draw_bar, clock: see `ProgressDisplay`.
    """

    def __init__(
        self,
        title: str,
        write_line: Callable[[str], None],
        draw_bar: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(write_line, draw_bar, _LINE_SECONDS, clock)
        self._title = title

    def __call__(self, done: int, total: int) -> None:
        """Shows the state if an update is due."""
        if self.is_due():
            settings = {"ncols": _COLUMNS, "prefix": self._title, "unit": " queries", "ascii": True}
            self.show(tqdm.format_meter(done, total, self.seconds, **settings))

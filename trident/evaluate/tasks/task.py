"""The interface of tasks, which turn a file into queries, and their scores into a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from megatron.config import ConfigSection, flag
from megatron.errors import DataError
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.scoring import Progress, Query, Score, Scorer
from trident.evaluate.statistics import Estimate

SHOWN_MISTAKES = 5
MOST_SHOWN_LETTERS = 300


class BaselineModel(Scorer, Protocol):
    """A model that a network has to beat; see `trident.evaluate.baselines`."""

    @property
    def name(self) -> str:
        """The name of its row in tables."""

    @property
    def is_uniform(self) -> bool:
        """True if all tokens are equally probable."""

    def complete(self, prompt: Sequence[int], count: int) -> list[int]:
        """Its continuation of a prompt by at most `count` tokens."""


class BaselineSource(Protocol):
    """A source of baselines for tasks."""

    def fitted_to(self, train: Path | None) -> Sequence[BaselineModel]:
        """The baselines, fitted to a training text, or to the default one."""


# Continues prompts greedily: (prompts, most new tokens, stop texts) -> continuations.
Complete = Callable[[Sequence[str], int, Sequence[str]], Sequence[str]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Mistake:
    """A wrongly predicted item.

    Attributes:
        source: file and line of the item.
        context: the end of the context.
        expected: the right answer.
        predicted: the prediction.
    """

    source: str
    context: str
    expected: str
    predicted: str


@dataclass(frozen=True)
class TaskMeasurement:
    """The metrics of one model on the items of a task.

    Attributes:
        estimates: value and standard error of each metric.
        per_item: the values of each item, in the order of the file, with its file and line under "item".
        mistakes: the first few wrong predictions.
    """

    estimates: Mapping[str, Estimate]
    per_item: tuple[Mapping[str, Any], ...] = ()
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
        kind: kind of the task (`KINDS` in `tasks_file.py`).
        figures: values by metric.
        errors: standard errors by metric; missing for single items.
        count: number of items.
        wrong: the first few wrong predictions.
        per_item: the values of each item, in the order of the file, for paired comparisons.
        baselines: the figures of each baseline on the same items, weakest first.
        baseline_errors: their standard errors.
        notes: what a reader of the figures has to know.
    """

    name: str
    kind: str
    figures: Mapping[str, float]
    errors: Mapping[str, float]
    count: int
    wrong: tuple[Mistake, ...] = ()
    per_item: tuple[Mapping[str, Any], ...] = ()
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    baseline_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _called(work: Callable[[], Result]) -> Result:
    return work()


@dataclass(frozen=True)
class TaskOptions:
    """The options of running a task.

    Attributes:
        baselines: the source of baselines; None for none.
        complete: generates text, for tasks that need it.
        agree: calls functions that read files. On several ranks `partial(run_on_all, mesh)`, so that a file missing
            on one rank is an error on all.
        on_progress: called with the queries scored so far, and all of them.
    """

    baselines: BaselineSource | None = None
    complete: Complete | None = None
    agree: Callable[[Callable[[], Any]], Any] = _called
    on_progress: Progress | None = None


NO_OPTIONS = TaskOptions()


class Task(Protocol):
    """A task; running it is collective over the ranks of the scorer."""

    @property
    def title(self) -> str:
        """The name in tables and metrics."""

    def run(
        self, scorer: Scorer, tokenizer: Tokenizer, limit: int | None = None, options: TaskOptions = NO_OPTIONS
    ) -> TaskResult:
        """Measures the scorer's network.

        Args:
            limit: use only the first items.

        Raises:
            DataError: a file is missing or damaged, or an item does not fit the network.
        """


@dataclass(frozen=True)
class Prepared:
    """The items of a task, ready for scoring.

    Args:
        queries: the queries of all items.
        notes: what a reader of the figures has to know.
    """

    items: Sequence[Any]
    queries: Sequence[Query]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def count(self) -> int:
        return len(self.items)

    @property
    def constants(self) -> Mapping[str, TaskMeasurement]:
        """Baselines without a model, such as always the longest choice."""
        return {}

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> TaskMeasurement:
        """Computes the metrics from the scores of the queries.

        Args:
            is_uniform: the scores come from the uniform model, which has no predictions.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DescribedTask(ConfigSection):
    """The fields of all tasks, which are the keys of a tasks file.

    Attributes:
        kind: the kind of task in a tasks file.
        folder: folder of the tasks file.
    """

    name: str | None = flag(None, "name in tables and metrics; by default the kind of task and the file")
    data: str = flag(help="file with the items, relative to the tasks file")
    train: str | None = flag(
        None,
        "file that the unigram and bigram baselines are fitted to: text, jsonl or tokens",
    )
    folder: Path = field(default=Path(), kw_only=True)

    kind: ClassVar[str]

    @property
    def title(self) -> str:
        return self.name or f"{self.kind}:{Path(self.data).stem}"

    @property
    def path(self) -> Path:
        return self.folder / self.data

    @property
    def train_path(self) -> Path | None:
        """The training text of the baselines, if the task has its own."""
        return None if self.train is None else self.folder / self.train


@dataclass(frozen=True)
class ScoredTask(DescribedTask):
    """A task scored by the probabilities of given tokens."""

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        """Reads the file and builds the queries.

        Raises:
            DataError: the file is missing or damaged, or an item does not fit the network.
        """
        raise NotImplementedError

    def run(
        self, scorer: Scorer, tokenizer: Tokenizer, limit: int | None = None, options: TaskOptions = NO_OPTIONS
    ) -> TaskResult:
        """Measures the scorer's network, and the baselines on the same queries."""
        prepared: Prepared = options.agree(lambda: self.prepare(tokenizer, scorer.max_length, limit))
        if not prepared.count:
            raise DataError(f"{self.path} holds no item. Give a file with at least one.")
        fitted = () if options.baselines is None else options.agree(lambda: self._fitted(options.baselines))
        baselines = {} if options.baselines is None else dict(prepared.constants)
        for baseline in fitted:
            scores = baseline.score(prepared.queries)
            baselines[baseline.name] = prepared.measure(scores, is_uniform=baseline.is_uniform)
        measured = prepared.measure(scorer.score(prepared.queries, options.on_progress))
        return result_of(self, measured, prepared.count, baselines, prepared.notes)

    def _fitted(self, baselines: BaselineSource | None) -> Any:
        return () if baselines is None else baselines.fitted_to(self.train_path)


def result_of(
    task: DescribedTask,
    measured: TaskMeasurement,
    count: int,
    baselines: Mapping[str, TaskMeasurement],
    notes: tuple[str, ...] = (),
) -> TaskResult:
    """The result of a task from the measurements of the network and the baselines."""
    return TaskResult(
        name=task.title,
        kind=task.kind,
        figures=_values(measured),
        errors=_errors(measured),
        count=count,
        wrong=tuple(replace(mistake, source=_short(mistake.source)) for mistake in measured.mistakes),
        per_item=tuple({**item, "item": _short(item["item"])} for item in measured.per_item),
        baselines={name: _values(one) for name, one in baselines.items()},
        baseline_errors={name: _errors(one) for name, one in baselines.items()},
        notes=notes,
    )


def shown_end(text: str) -> str:
    """The end of a context, shortened for display."""
    return text if len(text) <= MOST_SHOWN_LETTERS else f"...{text[-MOST_SHOWN_LETTERS:]}"


def _short(source: str) -> str:
    """The source without the file's folders, so that results do not depend on them."""
    return source.rsplit("/", 1)[-1]


def _values(measured: TaskMeasurement) -> dict[str, float]:
    return {metric: estimate.value for metric, estimate in measured.estimates.items()}


def _errors(measured: TaskMeasurement) -> dict[str, float]:
    return {metric: estimate.error for metric, estimate in measured.estimates.items() if estimate.error is not None}

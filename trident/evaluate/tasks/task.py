"""What a task is: a description that turns a file into queries, and their scores into a result."""

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
    """A model that a network has to beat; `trident.evaluate.baselines` has those in closed form."""

    @property
    def name(self) -> str:
        """Its row in tables."""

    @property
    def is_uniform(self) -> bool:
        """Whether it prefers no token."""

    def complete(self, prompt: Sequence[int], count: int) -> list[int]:
        """Its continuation of a prompt by at most `count` tokens."""


class BaselineSource(Protocol):
    """Where tasks get their baselines from."""

    def fitted_to(self, train: Path | None) -> Sequence[BaselineModel]:
        """The baselines, fitted to a training text or to that of all tasks."""


# Continues prompts greedily: (prompts, most new tokens, texts that end a continuation) -> continuations.
Complete = Callable[[Sequence[str], int, Sequence[str]], Sequence[str]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Mistake:
    """An item that was predicted wrongly.

    Attributes:
        place: file and line of the item.
        context: the end of what was given.
        expected: the right answer.
        predicted: what was said instead.
    """

    place: str
    context: str
    expected: str
    predicted: str


@dataclass(frozen=True)
class Measured:
    """What the scores of one model say about the items of a task.

    Attributes:
        estimates: a figure with its standard error, by metric.
        per_item: the values of each item, in the order of the file, with its place under "item".
        mistakes: the first few wrong predictions.
    """

    estimates: Mapping[str, Estimate]
    per_item: tuple[Mapping[str, Any], ...] = ()
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
        kind: what kind of task it is (`KINDS` in `tasks_file.py`).
        figures: a value by metric.
        errors: the standard error of each figure; a figure of a single item has none.
        count: number of items.
        wrong: the first few wrong predictions.
        per_item: what each item contributed, in the order of the file, for paired comparisons.
        baselines: the figures of each baseline on the same items, from the weakest on.
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
    """How a task is run.

    Attributes:
        baselines: fits the baselines; None leaves them out.
        complete: generates text; needed by tasks that do.
        agree: runs the reading of files. On several ranks `partial(run_on_all, mesh)`, so that a file which is missing
            on one rank is an error on all of them.
        on_progress: called with the queries scored so far, and all of them.
    """

    baselines: BaselineSource | None = None
    complete: Complete | None = None
    agree: Callable[[Callable[[], Any]], Any] = _called
    on_progress: Progress | None = None


NO_OPTIONS = TaskOptions()


class Task(Protocol):
    """Something that is measured; collective over the ranks of the scorer."""

    @property
    def title(self) -> str:
        """Its name in tables and metrics."""

    def run(
        self, scorer: Scorer, tokenizer: Tokenizer, limit: int | None = None, options: TaskOptions = NO_OPTIONS
    ) -> TaskResult:
        """Measures the scorer's network.

        Args:
            limit: take only this many items from the beginning.

        Raises:
            DataError: a file is missing or damaged, or an item does not fit the network.
        """


@dataclass(frozen=True)
class Prepared:
    """The items of a task, ready to be scored.

    Args:
        queries: what is asked about all items.
        notes: what a reader of the figures has to know.
    """

    items: Sequence[Any]
    queries: Sequence[Query]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.items)

    @property
    def constants(self) -> Mapping[str, Measured]:
        """Baselines that need no model, such as always the longest choice."""
        return {}

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> Measured:
        """What the answers to the queries say.

        Args:
            is_uniform: they come from the uniform model, which prefers no answer.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DescribedTask(ConfigSection):
    """What the descriptions of all tasks have; the fields are the keys of a tasks file.

    Attributes:
        kind: the word for it in a tasks file.
        folder: of the tasks file.
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
        """Its name in tables and metrics."""
        return self.name or f"{self.kind}:{Path(self.data).stem}"

    @property
    def path(self) -> Path:
        """The file with the items."""
        return self.folder / self.data

    @property
    def train_path(self) -> Path | None:
        """The training text of the baselines, if the task has its own."""
        return None if self.train is None else self.folder / self.train


@dataclass(frozen=True)
class ScoredTask(DescribedTask):
    """A task whose answers are the probabilities of given tokens."""

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        """Reads the file and makes the queries.

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
    measured: Measured,
    count: int,
    baselines: Mapping[str, Measured],
    notes: tuple[str, ...] = (),
) -> TaskResult:
    """The result of a task from what was measured of the network and of the baselines."""
    return TaskResult(
        name=task.title,
        kind=task.kind,
        figures=_values(measured),
        errors=_errors(measured),
        count=count,
        wrong=tuple(replace(mistake, place=_short(mistake.place)) for mistake in measured.mistakes),
        per_item=tuple({**item, "item": _short(item["item"])} for item in measured.per_item),
        baselines={name: _values(one) for name, one in baselines.items()},
        baseline_errors={name: _errors(one) for name, one in baselines.items()},
        notes=notes,
    )


def shown_end(text: str) -> str:
    """The end of a context, short enough to be read."""
    return text if len(text) <= MOST_SHOWN_LETTERS else f"...{text[-MOST_SHOWN_LETTERS:]}"


def _short(place: str) -> str:
    """A place without the folders of its file, so that results from another folder are the same."""
    return place.rsplit("/", 1)[-1]


def _values(measured: Measured) -> dict[str, float]:
    return {metric: estimate.value for metric, estimate in measured.estimates.items()}


def _errors(measured: Measured) -> dict[str, float]:
    return {metric: estimate.error for metric, estimate in measured.estimates.items() if estimate.error is not None}

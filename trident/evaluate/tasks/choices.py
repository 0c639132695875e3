"""Items with several choices, one of them right, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trident.evaluate.scoring import Score
from trident.evaluate.statistics import mean
from trident.evaluate.tasks.task import SHOWN_MISTAKES, Mistake, Prepared, TaskMeasurement, shown_end

# The value that ranks choices, highest best: (item, index of the choice, its score).
Preference = Callable[["ChoiceItem", int, Score], float]
# The same without a score: (item, index of the choice).
Habit = Callable[["ChoiceItem", int], float]


@dataclass(frozen=True)
class ChoiceItem:
    """A question with its choices.

    Attributes:
        context: the question as shown in mistakes.
        answer: index of the right choice.
    """

    source: str
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class PreparedChoices(Prepared):
    """Items with a query for each choice, item by item, optionally followed by queries without the question.

    Attributes:
        preferences: ranking of the choices by each metric; the first one selects the mistakes to show.
        habits: baselines that choose without a model, by name.
    """

    items: Sequence[ChoiceItem]
    preferences: Mapping[str, Preference]
    habits: Mapping[str, Habit]

    @property
    def constants(self) -> Mapping[str, TaskMeasurement]:
        return {name: constant(self.items, self._leading, value) for name, value in self.habits.items()}

    @property
    def _leading(self) -> str:
        return next(iter(self.preferences))

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> TaskMeasurement:
        """The share of items whose right choice ranks highest, by metric; a tie counts as a fraction."""
        count = sum(len(item.choices) for item in self.items)
        with_question, alone = scores[:count], scores[count:]
        rankings = {
            metric: self._ranked(lambda item, index, number, rank=rank: rank(item, number, with_question[index]))  # type: ignore[misc]
            for metric, rank in self.preferences.items()
        }
        if alone:
            rankings["acc_unconditional"] = self._ranked(
                lambda item, index, number: with_question[index].logprob - alone[index].logprob
            )
        credits = {metric: self._credits(values) for metric, values in rankings.items()}
        per_item = tuple(
            {"item": item.source, **{metric: credits[metric][number] for metric in credits}}
            for number, item in enumerate(self.items)
        )
        mistakes = () if is_uniform else self._mistakes(rankings[self._leading], credits[self._leading])
        return TaskMeasurement({metric: mean(values) for metric, values in credits.items()}, per_item, mistakes)

    def _ranked(self, value: Callable[[ChoiceItem, int, int], float]) -> list[list[float]]:
        """The value of each choice of each item, given the item, the index of the query, and that of the choice."""
        values, index = [], 0
        for item in self.items:
            values.append([value(item, index + number, number) for number in range(len(item.choices))])
            index += len(item.choices)
        return values

    def _credits(self, rankings: Sequence[Sequence[float]]) -> list[float]:
        return [credit(values, item.answer) for values, item in zip(rankings, self.items, strict=True)]

    def _mistakes(self, rankings: Sequence[Sequence[float]], credits: Sequence[float]) -> tuple[Mistake, ...]:
        wrong = [number for number, value in enumerate(credits) if value == 0.0][:SHOWN_MISTAKES]
        return tuple(
            Mistake(item.source, shown_end(item.context), item.choices[item.answer], item.choices[chosen])
            for item, chosen in ((self.items[number], _best(rankings[number])) for number in wrong)
        )


def credit(values: Sequence[float], answer: int) -> float:
    """1 if the right choice has the highest value, a fraction if others tie with it, otherwise 0."""
    highest = max(values)
    return 1.0 / sum(value == highest for value in values) if values[answer] == highest else 0.0


def constant(items: Sequence[ChoiceItem], metric: str, value: Habit) -> TaskMeasurement:
    """A baseline that ranks the choices of each item without a model."""
    credits = [credit([value(item, number) for number in range(len(item.choices))], item.answer) for item in items]
    return TaskMeasurement({metric: mean(credits)})


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda number: values[number])

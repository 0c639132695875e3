"""Items with several choices of which one is right: what the scores of the choices say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trident.evaluate.scoring import Score
from trident.evaluate.statistics import mean
from trident.evaluate.tasks.task import SHOWN_MISTAKES, Measured, Mistake, Prepared, shown_end

# Makes a value of a choice that the right one should have the highest of: (item, number of the choice, its score).
Preference = Callable[["ChoiceItem", int, Score], float]
# The same without a score: (item, number of the choice).
Habit = Callable[["ChoiceItem", int], float]


@dataclass(frozen=True)
class ChoiceItem:
    """A question with its choices.

    Attributes:
        context: what is shown of the question.
        answer: number of the right choice, from 0.
    """

    place: str
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class PreparedChoices(Prepared):
    """Items with a query for each choice, item by item, then those about each choice without its question.

    Attributes:
        preferences: how each metric ranks the choices; the first one decides which mistakes are shown.
        habits: baselines that choose without a model, by name.
    """

    items: Sequence[ChoiceItem]
    preferences: Mapping[str, Preference]
    habits: Mapping[str, Habit]

    @property
    def constants(self) -> Mapping[str, Measured]:
        """What the habits answer."""
        return {name: constant(self.items, self._leading, value) for name, value in self.habits.items()}

    @property
    def _leading(self) -> str:
        return next(iter(self.preferences))

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> Measured:
        """The share of items whose right choice ranks highest, by metric; a tie counts in parts."""
        count = sum(len(item.choices) for item in self.items)
        with_question, alone = scores[:count], scores[count:]
        rankings = {
            metric: self._ranked(lambda item, place, number, rank=rank: rank(item, number, with_question[place]))  # type: ignore[misc]
            for metric, rank in self.preferences.items()
        }
        if alone:
            rankings["acc_unconditional"] = self._ranked(
                lambda item, place, number: with_question[place].logprob - alone[place].logprob
            )
        credits = {metric: self._credits(values) for metric, values in rankings.items()}
        per_item = tuple(
            {"item": item.place, **{metric: credits[metric][number] for metric in credits}}
            for number, item in enumerate(self.items)
        )
        mistakes = () if is_uniform else self._mistakes(rankings[self._leading], credits[self._leading])
        return Measured({metric: mean(values) for metric, values in credits.items()}, per_item, mistakes)

    def _ranked(self, value: Callable[[ChoiceItem, int, int], float]) -> list[list[float]]:
        """A value of each choice of each item, by item, place among all queries, and number of the choice."""
        values, place = [], 0
        for item in self.items:
            values.append([value(item, place + number, number) for number in range(len(item.choices))])
            place += len(item.choices)
        return values

    def _credits(self, rankings: Sequence[Sequence[float]]) -> list[float]:
        return [credit(values, item.answer) for values, item in zip(rankings, self.items, strict=True)]

    def _mistakes(self, rankings: Sequence[Sequence[float]], credits: Sequence[float]) -> tuple[Mistake, ...]:
        wrong = [number for number, value in enumerate(credits) if value == 0.0][:SHOWN_MISTAKES]
        return tuple(
            Mistake(item.place, shown_end(item.context), item.choices[item.answer], item.choices[chosen])
            for item, chosen in ((self.items[number], _best(rankings[number])) for number in wrong)
        )


def credit(values: Sequence[float], answer: int) -> float:
    """1 if the right choice has the highest value, a share of it if others have the same, else 0."""
    highest = max(values)
    return 1.0 / sum(value == highest for value in values) if values[answer] == highest else 0.0


def constant(items: Sequence[ChoiceItem], metric: str, value: Habit) -> Measured:
    """A baseline that ranks the choices of each item without a model."""
    credits = [credit([value(item, number) for number in range(len(item.choices))], item.answer) for item in items]
    return Measured({metric: mean(credits)})


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda number: values[number])

"""Multiple choice: questions with several answers, ranked by their probability.

`acc` compares the log-probabilities of the choices after the question, `acc_norm` the same divided by the bytes of each
choice, and `acc_unconditional` the difference to the log-probability of the choice without the question.

Source: Brown et al., "Language models are few-shot learners", 2020, section 2.4 (normalization); bytes instead of
tokens as in EleutherAI/lm-evaluation-harness `lm_eval/api/task.py`, so that tokenizers can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from megatron.config import flag
from megatron.errors import DataError, printable
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import JsonRow, checked_text, read_rows
from trident.evaluate.scoring import Score, continuation_query
from trident.evaluate.tasks.choices import ChoiceItem, Habit, PreparedChoices
from trident.evaluate.tasks.task import Prepared, ScoredTask

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PLACE_OF_QUESTION = "{question}"


@dataclass(frozen=True)
class MultipleChoice(ScoredTask):
    """Questions of a jsonl file with `question` or `query`, `choices`, and `answer` (an index from 0, or a letter)."""

    kind: ClassVar[str] = "multiple_choice"

    template: str = flag(PLACE_OF_QUESTION, "text before a choice; {question} is replaced by the question")
    separator: str = flag(" ", "text between question and choice")
    unconditional: bool = flag(False, "also rank by the log-probability minus that without the question")
    few_shot: int = flag(0, "number of answered questions before each question, the first of `examples`", at_least=0)
    examples: str | None = flag(None, "jsonl file of the questions for few_shot")

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        front = self._front()
        items = [_item(row) for row in islice(read_rows(self.path), limit)]
        queries, alone = [], []
        for item in items:
            context = front + self._asked(item)
            for choice in item.choices:
                text = self.separator + choice
                queries.append(continuation_query(tokenizer, context, text, max_length, item.source))
                if self.unconditional:
                    alone.append(continuation_query(tokenizer, "", text, max_length, item.source))
        habits: dict[str, Habit] = {
            "chance": lambda item, number: 0.0,
            "longest": lambda item, number: float(len(item.choices[number].encode())),
            "position": _most_frequent_position(items),
        }
        preferences = {"acc": _logprob, "acc_norm": _logprob_per_byte}
        notes = (f"{self.few_shot} questions with answers in front",) if self.few_shot else ()
        return PreparedChoices(items, [*queries, *alone], preferences, habits, notes=notes)

    def _asked(self, item: ChoiceItem) -> str:
        return self.template.replace(PLACE_OF_QUESTION, item.context)

    def _front(self) -> str:
        """The answered questions in front of each question."""
        if not self.few_shot:
            return ""
        path = self.folder / str(self.examples)
        shown = [_item(row) for row in islice(read_rows(path), self.few_shot)]
        if len(shown) < self.few_shot:
            raise DataError(f"{path} holds {len(shown)} questions, but few_shot is {self.few_shot}. Use fewer.")
        return "".join(f"{self._asked(item)}{self.separator}{item.choices[item.answer]}\n\n" for item in shown)

    def problems(self) -> Iterator[str]:
        if PLACE_OF_QUESTION not in self.template:
            yield f"--template {self.template} must hold {PLACE_OF_QUESTION}, where the question goes."
        if self.few_shot and self.examples is None:
            yield f"--few-shot {self.few_shot} requires --examples, a file of other questions with answers."


def _logprob(item: ChoiceItem, number: int, score: Score) -> float:
    return score.logprob


def _logprob_per_byte(item: ChoiceItem, number: int, score: Score) -> float:
    return score.logprob / len(item.choices[number].encode())


def _most_frequent_position(items: Sequence[ChoiceItem]) -> Habit:
    """Always the index that is most often right among these items, which no model can know."""
    counts = Counter(item.answer for item in items)
    return lambda item, number: float(counts[number])


def _item(row: JsonRow) -> ChoiceItem:
    """Reads the question of a line.

    Raises:
        DataError: a missing part, or an answer that is none of the choices.
    """
    given = row.values.get("choices")
    if not isinstance(given, list) or len(given) < 2:
        raise DataError(f'{row.source} must have a list of two or more texts under "choices", not {printable(given)}.')
    choices = tuple(checked_text(choice, f'{row.source}: "choices"') for choice in given)
    if not all(choice.strip() for choice in choices):
        raise DataError(f"{row.source} has an empty choice: {printable(choices)}.")
    return ChoiceItem(row.source, row.text("question", "query"), choices, _answer(row, len(choices)))


def _answer(row: JsonRow, count: int) -> int:
    answer = row.values.get("answer")
    if isinstance(answer, str) and len(answer) == 1 and answer.upper() in _LETTERS:
        answer = _LETTERS.index(answer.upper())
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < count:
        raise DataError(
            f'{row.source}: "answer" {printable(row.values.get("answer"))} is none of the {count} choices. Give an '
            f"index from 0 to {count - 1}, or a letter from A to {_LETTERS[min(count, len(_LETTERS)) - 1]}."
        )
    return answer

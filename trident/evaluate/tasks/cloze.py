"""Cloze questions: candidates for the blank in a sentence after a story.

Source: Hill et al., "The Goldilocks principle: Reading children's books with explicit memory representations", 2016
(the Children's Book Test, its file format, and the baseline of the most frequent candidate); candidates are compared
by the probability of candidate and rest of the sentence, as in Radford et al., "Language models are unsupervised
multitask learners", 2019, section 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron.config import flag
from megatron.errors import DataError, printable
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import JsonRow, checked_text, read_lines, read_rows
from trident.evaluate.scoring import Query, Score, continuation_query
from trident.evaluate.tasks.choices import ChoiceItem, Habit, PreparedChoices
from trident.evaluate.tasks.task import Prepared, ScoredTask

BLANK = "XXXXX"
_NUMBERED = re.compile(r"^(\d+) (.*)$")


@dataclass(frozen=True)
class ClozeQuestion:
    """A story, a sentence with a blank, and the candidates for it."""

    source: str
    story: str
    before: str
    after: str
    candidates: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Cloze(ScoredTask):
    """Cloze questions in the format of the Children's Book Test, or in a jsonl file.

    A line of jsonl has `context` (a text, or a list of sentences), `query` or `question` with XXXXX for the blank,
    `candidates` or `choices`, and `answer`.
    """

    kind: ClassVar[str] = "cloze"

    candidate_only: bool = flag(False, "compare the candidates' probabilities without the rest of the sentence")

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        items: list[ChoiceItem] = []
        queries: list[Query] = []
        for question in read_cloze(self.path):
            if limit is not None and len(items) >= limit:
                break
            context = f"{question.story} {question.before}".strip()
            rest = "" if self.candidate_only else question.after
            items.append(ChoiceItem(question.source, f"{context} {BLANK}{rest}", question.candidates, question.answer))
            queries += [
                continuation_query(tokenizer, context, f" {candidate}{rest}", max_length, question.source)
                for candidate in question.candidates
            ]
        habits: dict[str, Habit] = {"chance": lambda item, number: 0.0, "frequent": _occurrences}
        return PreparedChoices(items, queries, {"acc": _logprob}, habits)


def _logprob(item: ChoiceItem, number: int, score: Score) -> float:
    return score.logprob


def _occurrences(item: ChoiceItem, number: int) -> float:
    """The number of times that a candidate appears in the story as a word."""
    return float(len(re.findall(rf"(?<!\w){re.escape(item.choices[number])}(?!\w)", item.context)))


def read_cloze(path: Path) -> Iterator[ClozeQuestion]:
    """The questions of a file, which is jsonl if its name ends in .jsonl or .json.

    Raises:
        DataError: the file cannot be read, or a question is incomplete.
    """
    if path.suffix in (".jsonl", ".json"):
        yield from (_from_row(row) for row in read_rows(path))
        return
    story: list[str] = []
    for number, line in read_lines(path):
        if not line.strip():
            story = []
            continue
        numbered = _NUMBERED.match(line)
        if numbered is None:
            raise DataError(f"{path} line {number} does not begin with the number of its sentence: {printable(line)}.")
        if "\t" not in line:
            story.append(numbered.group(2))
            continue
        fields = [text.strip() for text in numbered.group(2).split("\t") if text.strip()]
        if len(fields) != 3:
            raise DataError(
                f"{path} line {number} must hold a question, its answer and its candidates between tabs, and has "
                f"{len(fields)} of them."
            )
        candidates = tuple(text for text in fields[2].split("|") if text)
        yield _question(f"{path} line {number}", " ".join(story), fields[0], candidates, fields[1])


def _from_row(row: JsonRow) -> ClozeQuestion:
    context: Any = row.values.get("context", "")
    sentences = context if isinstance(context, list) else [context]
    story = " ".join(checked_text(one, f'{row.source}: "context"') for one in sentences)
    key = "candidates" if "candidates" in row.values else "choices"
    given = row.values.get(key)
    if not isinstance(given, list):
        raise DataError(f'{row.source} must have a list of texts under "candidates" or "choices".')
    candidates = tuple(checked_text(one, f'{row.source}: "{key}"') for one in given)
    return _question(row.source, story, row.text("query", "question"), candidates, row.text("answer"))


def _question(source: str, story: str, query: str, candidates: tuple[str, ...], answer: str) -> ClozeQuestion:
    """Builds a question.

    Raises:
        DataError: no blank, fewer than two candidates, or an answer that is not one of them.
    """
    if query.count(BLANK) != 1:
        raise DataError(f"{source}: the question must hold {BLANK} once, for the blank: {printable(query)}.")
    if len(candidates) < 2 or len(set(candidates)) != len(candidates):
        raise DataError(f"{source}: expected at least two different candidates, got {printable(candidates)}.")
    if answer not in candidates:
        raise DataError(f"{source}: answer {printable(answer)} is not among the candidates {printable(candidates)}.")
    before, after = query.split(BLANK)
    return ClozeQuestion(source, story, before.rstrip(), after, candidates, candidates.index(answer))

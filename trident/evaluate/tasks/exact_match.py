"""Exact match of the text that a network generates after a prompt with the answer.

Both texts are normalized first: compatibility forms (NFKC), case folding, runs of white space replaced by one blank,
and quotes, brackets, sentence marks and white space stripped at both ends. With `normalize: none` only white
space at both ends is stripped.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from megatron.config import flag
from megatron.errors import ConfigError, DataError, printable
from megatron.tokenizers.prompts import encode_prompt
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import JsonRow, checked_text, read_rows
from trident.evaluate.scoring import Scorer
from trident.evaluate.statistics import mean
from trident.evaluate.tasks.task import (
    NO_OPTIONS,
    SHOWN_MISTAKES,
    BaselineModel,
    DescribedTask,
    Mistake,
    TaskMeasurement,
    TaskOptions,
    TaskResult,
    result_of,
    shown_end,
)

_PROMPTS_AT_ONCE = 32
_EDGES = " .,;:!?\"'()[]{}“”‘’«»"
_WHITE_SPACE = re.compile(r"\s+")
Normalize = Callable[[str], str]


def normalized(text: str) -> str:
    """The normalized form of a text, used to compare answers."""
    return _WHITE_SPACE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip(_EDGES)


def before_stops(text: str, stops: Sequence[str], *, keeps_blanks: bool = False) -> str:
    """An answer up to the first of the stop texts.

    Args:
        keeps_blanks: keep leading blanks; otherwise they are stripped before stop texts are searched.
    """
    text = text if keeps_blanks else text.lstrip(" ")
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=len(text))]


@dataclass(frozen=True)
class ExactMatch(DescribedTask):
    """Prompts of a jsonl file (`prompt` or `question`) with an `answer`, or several right `answers`."""

    kind: ClassVar[str] = "exact_match"

    template: str = flag("{prompt}", "text to continue; {prompt} is replaced by the prompt")
    max_new_tokens: int = flag(32, "most tokens of an answer", at_least=1)
    stop: tuple[str, ...] = flag(("\n",), "texts that end an answer", nargs="*")
    normalize: str = flag("usual", "normalization of texts before the comparison", choices=("usual", "none"))

    def problems(self) -> Iterator[str]:
        if "{prompt}" not in self.template:
            yield f"--template {self.template} must hold {{prompt}}, where the prompt goes."

    def run(
        self, scorer: Scorer, tokenizer: Tokenizer, limit: int | None = None, options: TaskOptions = NO_OPTIONS
    ) -> TaskResult:
        """Generates the answers of the network and of the baselines.

        Raises:
            ConfigError: text generation is not available.
            DataError: the file is missing or damaged, or holds no prompt.
        """
        if options.complete is None:
            raise ConfigError(
                f"the task {self.title} ({self.kind}) requires text generation, unavailable here. Run it with "
                "tools/evaluate.py."
            )
        items: list[Question] = options.agree(lambda: [_question(row) for row in islice(read_rows(self.path), limit)])
        if not items:
            raise DataError(f"{self.path} holds no prompt. Give a file with at least one.")
        prompts = [self.template.replace("{prompt}", item.prompt) for item in items]
        generated: list[str] = []
        for first in range(0, len(prompts), _PROMPTS_AT_ONCE):
            generated += options.complete(prompts[first : first + _PROMPTS_AT_ONCE], self.max_new_tokens, self.stop)
            if options.on_progress is not None:
                options.on_progress(len(generated), len(prompts))
        baselines = (
            {}
            if options.baselines is None
            else options.agree(lambda: self._baselines(items, prompts, tokenizer, options))
        )
        return result_of(self, self._measure(items, generated), len(items), baselines)

    def _measure(self, items: Sequence[Question], generated: Sequence[str]) -> TaskMeasurement:
        normalize: Normalize = normalized if self.normalize == "usual" else str.strip
        answers = [normalize(before_stops(text, self.stop)) for text in generated]
        hits = [
            float(answer in {normalize(right) for right in item.answers})
            for item, answer in zip(items, answers, strict=True)
        ]
        per_item: list[dict[str, Any]] = [
            {"item": item.source, "exact_match": hit, "predicted": answer}
            for item, hit, answer in zip(items, hits, answers, strict=True)
        ]
        wrong = [number for number, hit in enumerate(hits) if not hit][:SHOWN_MISTAKES]
        mistakes = (
            Mistake(items[number].source, shown_end(items[number].prompt), items[number].answers[0], generated[number])
            for number in wrong
        )
        return TaskMeasurement({"exact_match": mean(hits)}, tuple(per_item), tuple(mistakes))

    def _baselines(
        self, items: Sequence[Question], prompts: Sequence[str], tokenizer: Tokenizer, options: TaskOptions
    ) -> dict[str, TaskMeasurement]:
        """The most frequent answer, and the texts of the unigram and bigram models."""
        usual = Counter(item.answers[0] for item in items).most_common(1)[0][0]
        measured = {"frequent": self._measure(items, [usual] * len(items))}
        fitted = () if options.baselines is None else options.baselines.fitted_to(self.train_path)
        for baseline in fitted:
            if not baseline.is_uniform:
                texts = [self._written(baseline, prompt, tokenizer) for prompt in prompts]
                measured[baseline.name] = self._measure(items, texts)
        return measured

    def _written(self, baseline: BaselineModel, prompt: str, tokenizer: Tokenizer) -> str:
        tokens = encode_prompt(tokenizer, prompt)
        return tokenizer.decode(baseline.complete(tokens, self.max_new_tokens)) if tokens else ""


@dataclass(frozen=True)
class Question:
    """A prompt and its right answers."""

    source: str
    prompt: str
    answers: tuple[str, ...]


def _question(row: JsonRow) -> Question:
    answers = row.values.get("answers")
    if answers is None:
        return Question(row.source, row.text("prompt", "question"), (row.text("answer"),))
    if not isinstance(answers, list) or not answers:
        raise DataError(f'{row.source}: "answers" must be a list of texts, not {printable(answers)}.')
    texts = tuple(checked_text(answer, f'{row.source}: "answers"') for answer in answers)
    return Question(row.source, row.text("prompt", "question"), texts)

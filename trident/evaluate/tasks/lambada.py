"""LAMBADA: the last word of a passage, given the rest of it.

Source: Paperno et al., "The LAMBADA dataset: Word prediction requiring a broad discourse context", 2016; the predicted
tokens: bigscience Megatron-DeepSpeed `tasks/zeroshot_gpt/datasets.py` (`--strict-lambada`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.config import flag
from megatron.errors import DataError
from megatron.tokenizers.prompts import encode_prompt, start_ids
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import JsonRow, read_rows
from trident.evaluate.scoring import Query, Score, bounded_query, continuation_query
from trident.evaluate.statistics import exponential, mean
from trident.evaluate.tasks.task import SHOWN_MISTAKES, Mistake, Prepared, ScoredTask, TaskMeasurement, shown_end


@dataclass(frozen=True)
class Lambada(ScoredTask):
    """Passages of a jsonl file, whose last word, or only last token, is predicted."""

    kind: ClassVar[str] = "lambada"

    key: str = flag("text", "key of the passage")
    strict: bool = flag(True, "predict all tokens of the last word; otherwise only the last token of the passage")

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        sources: list[str] = []
        queries: list[Query] = []
        for row in read_rows(self.path):
            if limit is not None and len(queries) >= limit:
                break
            sources.append(row.source)
            queries.append(self._query(row, tokenizer, max_length))
        return PreparedPassages(sources, queries, tokenizer)

    def _query(self, row: JsonRow, tokenizer: Tokenizer, max_length: int) -> Query:
        text = row.text(self.key)
        words = text.split()
        if not words:
            raise DataError(f"{row.source} holds no word. Give a passage.")
        if self.strict:
            context = text[: text.rfind(words[-1])].strip()
            continuation = f" {words[-1]}" if context else words[-1]
            return continuation_query(tokenizer, context, continuation, max_length, row.source)
        tokens = encode_prompt(tokenizer, text)
        if len(tokens) == 1:
            tokens = [*start_ids(tokenizer), *tokens]
        return bounded_query(tokenizer, tokens, len(tokens) - 1, max_length, row.source)


@dataclass(frozen=True)
class PreparedPassages(Prepared):
    """One query per passage."""

    items: Sequence[str]  # file and line of each passage
    tokenizer: Tokenizer

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> TaskMeasurement:
        """The share of words whose tokens are all predicted, and the perplexity per word.

        The perplexity is exp(mean of -log p(word)), regardless of the number of tokens.
        """
        right = [math.exp(score.logprob) if is_uniform else float(score.is_greedy) for score in scores]
        estimates = {"acc": mean(right), "ppl": exponential(mean([-score.logprob for score in scores]))}
        per_item = tuple(
            {"item": source, "acc": hit, "logprob": score.logprob}
            for source, hit, score in zip(self.items, right, scores, strict=True)
        )
        wrong = [number for number, score in enumerate(scores) if not score.is_greedy][:SHOWN_MISTAKES]
        return TaskMeasurement(
            estimates, per_item, () if is_uniform else tuple(self._mistake(number, scores[number]) for number in wrong)
        )

    def _mistake(self, number: int, score: Score) -> Mistake:
        query = self.queries[number]
        context, meant, predicted = (
            self.tokenizer.decode(ids) for ids in (query.tokens[: query.first_target], query.targets, score.predicted)
        )
        return Mistake(self.items[number], shown_end(context), meant, predicted)

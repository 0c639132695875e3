"""Batches of queries, and the collection of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config import ModelConfig
from trident.evaluate.scoring import Progress, Query, Score, check_queries


@dataclass(frozen=True)
class QueryBatch:
    """Queries of similar length in one array, padded at the end.

    Queries attend only to earlier tokens and to a prefix, so padding at the end does not affect them.

    Shapes: inputs `[b, s]` int64; prefix `[b, s]` bool; rows, labels and indices `[n]` int64, one entry per target.

    Attributes:
        inputs: all tokens of each query but the last.
        prefix: mask of the inputs that are context.
        rows: the positions that predict the targets, as indices into `[b * s]`.
        labels: the targets.
        indices: index of each target among the targets of all queries, see `Answers`.
    """

    inputs: np.ndarray
    prefix: np.ndarray
    rows: np.ndarray
    labels: np.ndarray
    indices: np.ndarray


class Answers:
    """A log-probability and a greedy token for every target of all queries.

    A rank leaves values that it did not compute at 0, so that the vectors of all ranks and stages can be summed.

    Shapes: logprobs float64 and predicted int64, each `[targets of all queries]`.
    """

    def __init__(self, queries: Sequence[Query]) -> None:
        self.queries = queries
        counts = [len(query.tokens) - query.first_target for query in queries]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.logprobs = np.zeros(int(self.starts[-1]), np.float64)
        self.predicted = np.zeros(int(self.starts[-1]), np.int64)

    def batch(self, numbers: Sequence[int]) -> QueryBatch:
        """The batch of the queries with these numbers."""
        queries = [self.queries[number] for number in numbers]
        length = max(len(query.tokens) for query in queries) - 1
        inputs = np.zeros((len(queries), length), np.int64)
        prefix = np.zeros((len(queries), length), np.bool_)
        rows, labels, indices = [], [], []
        for row, (number, query) in enumerate(zip(numbers, queries, strict=True)):
            last = len(query.tokens) - 1
            inputs[row, :last] = query.tokens[:-1]
            prefix[row, : query.first_target] = True
            rows.append(row * length + np.arange(query.first_target - 1, last))
            labels.append(np.array(query.targets, np.int64))
            indices.append(np.arange(self.starts[number], self.starts[number + 1]))
        return QueryBatch(inputs, prefix, *(np.concatenate(parts) for parts in (rows, labels, indices)))

    def scores(self) -> list[Score]:
        """The scores of all queries, in their order."""
        scores = []
        for query, start, stop in zip(self.queries, self.starts[:-1], self.starts[1:], strict=True):
            predicted = tuple(self.predicted[start:stop].tolist())
            logprob = float(self.logprobs[start:stop].sum())
            scores.append(Score(logprob, len(predicted), predicted == query.targets, predicted))
        return scores


def plan_batches(queries: Sequence[Query], batch_tokens: int, *, padded_up_to: int | None = None) -> list[list[int]]:
    """Divides queries into batches of similar length; the longest come first.

    Depends only on the queries and the limits, so that results do not depend on the number of ranks.

    Args:
        batch_tokens: most tokens of a batch, padding included; a single query may have more.
        padded_up_to: length beyond which a batch may only have queries of equal length, because rotations depend on the
            length of the batch (`PositionFields.rotations_fixed_up_to`); None if padding never matters.

    Returns:
        the numbers of the queries of each batch.
    """
    return [batch for (batch,) in plan_rounds(queries, batch_tokens, 1, padded_up_to=padded_up_to)]


def plan_rounds(
    queries: Sequence[Query], batch_tokens: int, batches_per_round: int, *, padded_up_to: int | None = None
) -> list[list[list[int]]]:
    """`plan_batches` for batches that run concurrently in one shape: rounds of batches with equal numbers of queries.

    Args:
        batches_per_round: most batches of a round, among which its queries are divided evenly.

    Returns:
        the numbers of the queries of each batch of each round; the last batch of a round may have fewer.
    """
    lengths = [len(query.tokens) - 1 for query in queries]
    order = sorted(range(len(queries)), key=lambda number: (-lengths[number], number))
    rounds = []
    while order:
        longest = lengths[order[0]]
        most = max(1, batch_tokens // longest) * batches_per_round
        chosen = order[:most]
        if padded_up_to is not None and longest > padded_up_to:
            chosen = [number for number in chosen if lengths[number] == longest]
        rows = -(-len(chosen) // batches_per_round)
        rounds.append([chosen[first : first + rows] for first in range(0, len(chosen), rows)])
        order = order[len(chosen) :]
    return rounds


class NetworkScorer(ABC):
    """The base of `Scorer`s of a network over all its ranks; subclasses run the forward passes.

    Queries of similar length share a batch, batches run in rounds, and all ranks have all results.

    Args:
        model: the architecture.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    @property
    def max_length(self) -> int:
        """Most tokens of a query: one more than the network has positions."""
        return self.model.max_position_embeddings + 1

    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """The scores of queries, in their order; collective over all ranks.

        Raises:
            DataError: a query is too long, or has a token that the network does not know.
        """
        check_queries(queries, self.max_length, self.model.vocab_size)
        answers, done = Answers(queries), 0
        for numbers in self.rounds(queries):
            self.answer(answers, numbers)
            done += sum(map(len, numbers))
            if on_progress is not None:
                on_progress(done, len(queries))
        return self.gathered(answers).scores()

    @abstractmethod
    def rounds(self, queries: Sequence[Query]) -> Sequence[Sequence[Sequence[int]]]:
        """The batches of each round, as numbers of queries."""

    @abstractmethod
    def answer(self, answers: Answers, batches: Sequence[Sequence[int]]) -> None:
        """Runs a round, and writes this rank's results into `answers`."""

    def gathered(self, answers: Answers) -> Answers:
        """Combines the answers of all ranks, unless `answer` has already done so."""
        return answers

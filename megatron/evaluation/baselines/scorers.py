"""The closed-form models as scorers, fitted to a training text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron import log
from megatron.errors import DataError
from megatron.evaluation.baselines.ngrams import Bigram, Unigram
from megatron.evaluation.scoring import Progress, Query, Score
from megatron.evaluation.sources import read_documents
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer

MOST_TRAINING_TOKENS = 50_000_000  # a bigram model of so many needs about 2 GB while it is fitted
UNIFORM = "uniform"


class ClosedForm(Protocol):
    """A model whose probabilities depend on one token before the target at most."""

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Uniform:
    """Every token is as probable as any other; it predicts no token (-1), as all are equal."""

    vocab_size: int

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of targets, and -1 for each. Shapes: `[n]`."""
        return np.full(len(targets), -math.log(self.vocab_size)), np.full(len(targets), -1, np.int64)


@dataclass(frozen=True)
class Baseline:
    """A closed-form model with its name, a `Scorer` of queries of any length.

    Attributes:
        max_length: no limit.
    """

    name: str
    model: ClosedForm
    max_length: int = 1 << 62

    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """The scores of queries, in their order."""
        scores = []
        for query in queries:
            tokens = np.asarray(query.tokens, np.int64)
            targets = tokens[query.first_target :]
            logprobs, predicted = self.model.score(tokens[query.first_target - 1 : -1], targets)
            is_greedy = bool((predicted == targets).all())
            scores.append(Score(float(logprobs.sum()), len(targets), is_greedy, tuple(predicted.tolist())))
        return scores

    @property
    def is_uniform(self) -> bool:
        """Whether it prefers no token."""
        return isinstance(self.model, Uniform)

    def complete(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most probable continuation of a prompt, token by token; empty if all tokens are equally probable."""
        tokens = [int(prompt[-1])]
        for _ in range(count):
            _, predicted = self.model.score(np.array(tokens[-1:]), np.zeros(1, np.int64))
            if predicted[0] < 0:
                break
            tokens.append(int(predicted[0]))
        return tokens[1:]


@dataclass
class Baselines:
    """Fits the baselines to the training texts of tasks, each text once.

    Args:
        train: text, jsonl or token file for the tasks that name none of their own.
    """

    tokenizer: Tokenizer
    train: Path | None = None
    _fitted: dict[Path, tuple[Baseline, ...]] = field(default_factory=dict)

    def fitted_to(self, train: Path | None, key: str = "text") -> tuple[Baseline, ...]:
        """Uniform, unigram and bigram; without a training text, only uniform.

        Raises:
            DataError: the training text cannot be read or holds no token.
        """
        path = train or self.train
        uniform = Baseline(UNIFORM, Uniform(self.tokenizer.vocab_size))
        if path is None:
            return (uniform,)
        if path not in self._fitted:
            streams = _token_streams(path, key, self.tokenizer)
            unigram = Unigram.fit(streams, self.tokenizer.vocab_size)
            self._fitted[path] = (Baseline("unigram", unigram), Baseline("bigram", Bigram.fit(streams, unigram)))
        return (uniform, *self._fitted[path])


def _token_streams(path: Path, key: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of each document, after an end-of-document token if there is one; the first 50 million.

    Shapes: int64 `[n]` each.
    """
    eod_id = TokenizerRecord.of(tokenizer).eod_id
    start = [] if eod_id is None else [eod_id]
    streams: list[np.ndarray] = []
    count = 0
    for document in read_documents(path, key, tokenizer):
        streams.append(np.array([*start, *document.ids(tokenizer)], np.int64))
        count += len(streams[-1])
        if count >= MOST_TRAINING_TOKENS:
            log.info(f"the baselines are fitted to the first {count:,} tokens of {path}")
            break
    if count <= len(streams) * len(start):
        raise DataError(f"{path} holds no text to fit the baselines to. Give another training text.")
    return streams

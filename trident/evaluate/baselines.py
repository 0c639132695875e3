"""Closed-form language models that a network has to beat: uniform, unigram and bigram, fitted to a training text.

They score the same queries as a network, so that metrics are comparable. They are fitted once, and smoothed by absolute
discounting:

    unigram   p(w) = (c(w) + 1) / (N + V)
    bigram    p(w | v) = max(c(v w) - d, 0) / c(v) + d n(v) / c(v) p(w),   d = n1 / (n1 + 2 n2)

c counts in the training text of N tokens, V is the size of the vocabulary, n(v) the number of distinct tokens seen
after v, and n1 and n2 the numbers of pairs seen once and twice. After a token that was never followed by anything, the
bigram model is the unigram model.

Source: Ney, Essen and Kneser, "On structuring probabilistic dependences in stochastic language modelling", 1994,
(absolute discounting with interpolation, and d); add-one smoothing as in Chen and Goodman, "An empirical
study of smoothing techniques for language modeling", 1999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron import log
from megatron.errors import DataError
from megatron.tokenizers.prompts import start_ids
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import read_documents
from trident.evaluate.scoring import Progress, Query, Score

MOST_TRAINING_TOKENS = 50_000_000  # fitting a bigram model to this many takes about 2 GB
UNIFORM = "uniform"

_USUAL_DISCOUNT = 0.5  # if no pair was seen once or twice, so that d is undefined


class ClosedForm(Protocol):
    """A model whose probabilities depend on at most the token before the target."""

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Uniform:
    """All tokens are equally probable; the predicted token is -1, for none."""

    vocab_size: int

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of targets, and -1 for each. Shapes: `[n]`."""
        return np.full(len(targets), -math.log(self.vocab_size)), np.full(len(targets), -1, np.int64)


@dataclass(frozen=True)
class Baseline:
    """A named closed-form model, as a `Scorer` of queries of any length.

    Attributes:
        max_length: effectively no limit.
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
        train: text, jsonl or token file for tasks without their own.
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
    """The tokens of each document, after `start_ids`; at most 50 million.

    Shapes: int64 `[n]` each.
    """
    start = start_ids(tokenizer)
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


@dataclass(frozen=True)
class Unigram:
    """Token frequencies.

    Shapes: log_probabilities float64 `[V]`.
    """

    log_probabilities: np.ndarray

    @staticmethod
    def fit(streams: Sequence[np.ndarray], vocab_size: int) -> Unigram:
        """Counts the tokens of streams."""
        counts = np.zeros(vocab_size, np.int64)
        for stream in streams:
            counts += np.bincount(stream, minlength=vocab_size)
        return Unigram(np.log(counts + 1.0) - np.log(float(counts.sum() + vocab_size)))

    @property
    def best(self) -> int:
        """The most frequent token; of equals, the lowest id."""
        return int(self.log_probabilities.argmax())

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of targets, and the most probable token at the position of each.

        Shapes: contexts (the tokens before the targets), targets and both results `[n]`.
        """
        return self.log_probabilities[targets], np.full(len(targets), self.best, np.int64)


@dataclass(frozen=True)
class Bigram:
    """Frequencies of pairs of adjacent tokens, interpolated with a unigram model.

    Shapes: keys and counts `[pairs]`, sorted by key = v V + w; followed (c(v)), backoff (d n(v) / c(v), 1 for a token
        without successors) and best (the most probable token after each) `[V]`.
    """

    unigram: Unigram
    discount: float
    keys: np.ndarray
    counts: np.ndarray
    followed: np.ndarray
    backoff: np.ndarray
    best: np.ndarray

    @staticmethod
    def fit(streams: Sequence[np.ndarray], unigram: Unigram) -> Bigram:
        """Counts the pairs within each stream; pairs do not cross streams."""
        vocab_size = len(unigram.log_probabilities)
        pair_keys = [stream[:-1].astype(np.int64) * vocab_size + stream[1:] for stream in streams if len(stream) > 1]
        keys, counts = np.unique(np.concatenate([np.empty(0, np.int64), *pair_keys]), return_counts=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else _USUAL_DISCOUNT
        first = keys // vocab_size
        followed = np.bincount(first, weights=counts, minlength=vocab_size)
        kinds = np.bincount(first, minlength=vocab_size)
        backoff = np.where(followed > 0, discount * kinds / np.maximum(followed, 1), 1.0)
        best = np.full(vocab_size, unigram.best, np.int64)
        model = Bigram(unigram, discount, keys, counts, followed, backoff, best)
        model._find_best(first)
        return model

    def score(self, contexts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of targets after contexts, and the most probable token after each context.

        Shapes: contexts, targets and both results `[n]`.
        """
        return np.log(self._probabilities(contexts, targets)), self.best[contexts]

    def _probabilities(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Shapes: contexts, targets and the result `[n]`."""
        keys = contexts.astype(np.int64) * len(self.followed) + targets
        indices = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        seen = self.keys[indices] == keys if len(self.keys) else np.zeros(len(keys), np.bool_)
        counts = np.where(seen, self.counts[indices] if len(self.keys) else 0, 0)
        direct = np.maximum(counts - self.discount, 0.0) / np.maximum(self.followed[contexts], 1.0)
        return direct + self.backoff[contexts] * np.exp(self.unigram.log_probabilities[targets])

    def _find_best(self, first: np.ndarray) -> None:
        """Fills `best` with the best successor of each token, or the most frequent token if that is better."""
        if not len(self.keys):
            return
        chances = self._probabilities(first, self.keys % len(self.followed))
        order = np.lexsort((-self.keys, chances, first))  # the last entry of each group: most probable, lowest id
        last = np.append(np.diff(first[order]) != 0, True)
        contexts, winners = first[order][last], order[last]
        usual = np.full(len(contexts), self.unigram.best, np.int64)
        is_better = self._probabilities(contexts, usual) > chances[winners]
        self.best[contexts] = np.where(is_better, usual, self.keys[winners] % len(self.followed))

"""The queries of an evaluation: log-probabilities of tokens given the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.prompts import encode_continuation
from megatron.tokenizers.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # called with the number of scored queries and their total


@dataclass(frozen=True)
class Query:
    """A text, and the index of its first scored token.

    Args:
        tokens: ids of context and targets.
        first_target: index of the first target: `tokens[first_target:]` are scored, each given all tokens before it.
            At least 1, because nothing predicts the first token.

    Raises:
        ConfigError: no target, or no token before the first one.
    """

    tokens: tuple[int, ...]
    first_target: int

    def __post_init__(self) -> None:
        if not 1 <= self.first_target < len(self.tokens):
            raise ConfigError(
                f"first_target {self.first_target} is out of range for a query of {len(self.tokens)} tokens: it needs "
                "a token before it and a target. Put the end-of-document token before a text without context."
            )

    @property
    def targets(self) -> tuple[int, ...]:
        return self.tokens[self.first_target :]


@dataclass(frozen=True)
class Score:
    """The answer to a query.

    Attributes:
        logprob: sum of the log-probabilities of the targets, in nats.
        tokens: number of targets.
        is_greedy: True if each target is the most probable token at its position.
        predicted: the most probable token at the position of each target, given the true tokens before it.
    """

    logprob: float
    tokens: int
    is_greedy: bool
    predicted: tuple[int, ...]


class Scorer(Protocol):
    """Answers queries with one network."""

    @property
    def max_length(self) -> int:
        """Most tokens of a query: one more than the network has positions, as the last token is only a target."""

    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """The scores of queries, in their order.

        Collective over all ranks, which pass the same queries. The result is the same on every rank.

        Raises:
            DataError: a query is too long, or has a token that the network does not know.
        """


def check_queries(queries: Sequence[Query], max_length: int, vocab_size: int) -> None:
    """Checks that a network can score all queries.

    Raises:
        DataError: a query is too long, or has a token that the network does not know.
    """
    for number, query in enumerate(queries):
        if len(query.tokens) > max_length:
            raise DataError(
                f"query {number} has {len(query.tokens)} tokens, and the network has {max_length - 1} positions "
                f"(--max-position-embeddings {max_length - 1}), so a query may have at most {max_length} tokens. Drop "
                "the first tokens of its context, or score it in several windows."
            )
        unknown = next((token for token in query.tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise DataError(
                f"query {number} has the token {unknown}, and the vocabulary has {vocab_size} entries. Encode it with "
                "the tokenizer of the network."
            )


def continuation_query(tokenizer: Tokenizer, context: str, continuation: str, max_length: int, source: str) -> Query:
    """The query for a continuation, tokenized by `encode_continuation`.

    A context that is too long is truncated at its start.

    Args:
        max_length: most tokens of a query (`Scorer.max_length`).
        source: file and line of the item, for messages.

    Raises:
        DataError: the continuation is empty or longer than the network's positions, or has no token before it.
    """
    tokens, first_target = encode_continuation(tokenizer, context, continuation)
    return bounded_query(tokenizer, tokens, first_target, max_length, source)


def bounded_query(tokenizer: Tokenizer, tokens: list[int], first_target: int, max_length: int, source: str) -> Query:
    """A query whose context fits the network.

    Raises:
        DataError: no target, more targets than the network has positions, or no token before the first one.
    """
    if first_target >= len(tokens):
        raise DataError(f"{source}: there is no token to predict. Give a text that continues after its context.")
    if first_target == 0:
        raise DataError(
            f"{source}: there is no context, and the tokenizer {tokenizer.name} has no "
            "end-of-document token to start with. Give a context."
        )
    count = len(tokens) - first_target
    if count >= max_length:
        raise DataError(
            f"{source}: {count} tokens must be predicted, but the network has {max_length - 1} positions "
            f"(--max-position-embeddings {max_length - 1}). Shorten the text."
        )
    dropped = max(len(tokens) - max_length, 0)
    return Query(tuple(tokens[dropped:]), first_target - dropped)

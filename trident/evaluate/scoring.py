"""What is asked of a network in evaluation: the log-probability of some tokens after others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.prompts import encode_continuation
from megatron.tokenizers.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # called with the queries scored so far, and all of them


@dataclass(frozen=True)
class Query:
    """A text, and from which token on its tokens are scored.

    Args:
        tokens: the ids of context and targets.
        first_target: index of the first target: `tokens[first_target:]` are scored, each given all tokens before it.
            At least 1, because the first token has nothing before it that could predict it.

    Raises:
        ConfigError: there is no target, or no token before the first one.
    """

    tokens: tuple[int, ...]
    first_target: int

    def __post_init__(self) -> None:
        if not 1 <= self.first_target < len(self.tokens):
            raise ConfigError(
                f"first_target {self.first_target} is not a target of a query of {len(self.tokens)} tokens: there must "
                "be a token before it and one from it on. Put the end-of-document token before a text without context."
            )

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.tokens[self.first_target :]


@dataclass(frozen=True)
class Score:
    """The answer to a query.

    Attributes:
        logprob: sum of the log-probabilities of the targets, in nats.
        tokens: number of targets.
        is_greedy: whether each target is the most probable token at its place.
        predicted: the most probable token at the place of each target, given the true tokens before it.
    """

    logprob: float
    tokens: int
    is_greedy: bool
    predicted: tuple[int, ...]


class Scorer(Protocol):
    """Answers queries with one network."""

    @property
    def max_length(self) -> int:
        """The most tokens of a query: one more than the network has positions, as the last token is only a target."""

    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """The scores of queries, in their order.

        Collective over all ranks, which pass the same queries. The result is the same on every rank.

        Raises:
            DataError: a query is too long, or has a token that the network does not know.
        """


def check_queries(queries: Sequence[Query], max_length: int, vocab_size: int) -> None:
    """Checks that a network can answer all queries.

    Raises:
        DataError: a query is too long, or has a token that the network does not know.
    """
    for number, query in enumerate(queries):
        if len(query.tokens) > max_length:
            raise DataError(
                f"query {number} has {len(query.tokens)} tokens, and the network has {max_length - 1} positions "
                f"(--max-position-embeddings {max_length - 1}), so a query has at most {max_length} tokens, the last "
                "of which is only a target. Drop the first tokens of its context, or score it in several windows."
            )
        unknown = next((token for token in query.tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise DataError(
                f"query {number} has the token {unknown}, and the vocabulary has {vocab_size} entries. Encode it with "
                "the tokenizer of the network."
            )


def continuation_query(tokenizer: Tokenizer, context: str, continuation: str, max_length: int, place: str) -> Query:
    """Asks for the probability of a continuation, whose tokens `encode_continuation` gives.

    A context that is too long loses its first tokens.

    Args:
        max_length: the most tokens of a query (`Scorer.max_length`).
        place: file and line of the item, for messages.

    Raises:
        DataError: the continuation is empty or longer than the network's positions, or nothing stands before it.
    """
    tokens, first_target = encode_continuation(tokenizer, context, continuation)
    return bounded_query(tokenizer, tokens, first_target, max_length, place)


def bounded_query(tokenizer: Tokenizer, tokens: list[int], first_target: int, max_length: int, place: str) -> Query:
    """A query whose context fits the network.

    Raises:
        DataError: there is no target, more targets than the network has positions, or nothing before the first one.
    """
    if first_target >= len(tokens):
        raise DataError(f"{place}: there is no token to predict. Write a text that continues after its context.")
    if first_target == 0:
        raise DataError(
            f"{place}: nothing stands before the tokens to predict, and the tokenizer {tokenizer.name} has no "
            "end-of-document token to begin with. Write a context."
        )
    count = len(tokens) - first_target
    if count >= max_length:
        raise DataError(
            f"{place}: {count} tokens are to be predicted, and the network has {max_length - 1} positions "
            f"(--max-position-embeddings {max_length - 1}). Shorten the text."
        )
    dropped = max(len(tokens) - max_length, 0)
    return Query(tuple(tokens[dropped:]), first_target - dropped)

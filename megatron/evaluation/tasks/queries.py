"""Queries about how a text goes on: the tokens of a continuation after those of its context."""

from __future__ import annotations

from megatron.errors import DataError
from megatron.evaluation.scoring import Query
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import Tokenizer


def continuation_query(tokenizer: Tokenizer, context: str, continuation: str, max_length: int, place: str) -> Query:
    """Asks for the probability of a continuation.

    Context and continuation are encoded as one text, as a network meets them in training. The targets begin where the
    tokens of the whole text begin to differ from those of the context alone: a token that reaches from one into the
    other belongs to the continuation. Blanks at the end of the context do too, as byte-level tokenizers put a blank at
    the beginning of a word. A context that is too long loses its first tokens; an empty one becomes end-of-document.

    Args:
        max_length: the most tokens of a query (`Scorer.max_length`).
        place: file and line of the item, for messages.

    Raises:
        DataError: the continuation is empty or longer than the network's positions, or nothing stands before it.
    """
    kept = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    before = tokenizer.encode(kept) if kept else []
    first_target = 0
    for left, right in zip(before, whole, strict=False):
        if left != right:
            break
        first_target += 1
    return bounded_query(tokenizer, whole, first_target, max_length, place)


def bounded_query(tokenizer: Tokenizer, tokens: list[int], first_target: int, max_length: int, place: str) -> Query:
    """A query whose context fits the network.

    Raises:
        DataError: there is no target, more targets than the network has positions, or nothing before the first one.
    """
    if first_target >= len(tokens):
        raise DataError(f"{place}: there is no token to predict. Write a text that goes on after its context.")
    if first_target == 0:
        eod_id = TokenizerRecord.of(tokenizer).eod_id
        if eod_id is None:
            raise DataError(
                f"{place}: nothing stands before the tokens to predict, and the tokenizer {tokenizer.name} has no "
                "end-of-document token to begin with. Write a context."
            )
        tokens, first_target = [eod_id, *tokens], 1
    count = len(tokens) - first_target
    if count >= max_length:
        raise DataError(
            f"{place}: {count} tokens are to be predicted, and the network has {max_length - 1} positions "
            f"(--max-position-embeddings {max_length - 1}). Shorten the text."
        )
    dropped = max(len(tokens) - max_length, 0)
    return Query(tuple(tokens[dropped:]), first_target - dropped)

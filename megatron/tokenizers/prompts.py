"""The ids of texts that a network continues or is asked about: one rule for what the tokenizer puts around texts.

What it puts before a text (`<s>`) begins a prompt and is never a target. What it puts after one (`</s>`) says that the
document is over, so no prompt has it: a network would begin another document.

With a tokenizer that puts nothing after texts, the splits equal those of lm-evaluation-harness's `hf` model. With one
that does, the harness itself takes the `</s>` for a part of the continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import Tokenizer


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What a text without context begins after: what the tokenizer puts before texts, else end-of-document.

    Empty if there is neither.
    """
    try:
        return list(tokenizer.ids_before) or [tokenizer.eod_id]
    except ConfigError:  # it has no such token
        return []


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to be continued; an empty text is `start_ids`.

    A text that begins with what the tokenizer puts before texts, written out, gets it once.
    """
    before, ids = list(tokenizer.ids_before), tokenizer.encode_bare(text)
    if before and ids[: len(before)] != before:
        ids = [*before, *ids]
    return ids or start_ids(tokenizer)


def encode_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """The ids of a context with its continuation, and from which of them on they belong to the continuation.

    Both are encoded as one text, as a network meets them in training. The continuation begins where the ids of the
    whole begin to differ from the ids of the context alone: a token that reaches from one into the other belongs to the
    continuation. Blanks at the end of the context do too, as byte-level tokenizers put a blank at the beginning of a
    word.

    Returns:
        the ids, and the place of the first of the continuation's: their number if it has none, and 0 only where the
        tokenizer has no token to begin with (`start_ids`).
    """
    before, whole = (encode_prompt(tokenizer, text) for text in (context.rstrip(), context + continuation))
    first = 0
    for left, right in zip(before, whole, strict=False):
        if left != right:
            break
        first += 1
    if first > 0:
        return whole, first
    start = start_ids(tokenizer)
    return [*start, *whole], len(start)


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a whole text, without what surrounds it; equal to `inner_ids` of the document in a token file."""
    return inner_ids(tokenizer, tokenizer.encode_bare(text))


def inner_ids(tokenizer: Tokenizer, document: Sequence[int]) -> list[int]:
    """A document without what the tokenizer puts before texts, and without the ends that follow it."""
    before, ends = list(tokenizer.ids_before), set(_ends(tokenizer))
    ids = list(document)
    if before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    while ids and ids[-1] in ends:
        ids.pop()
    return ids


def special_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """The UTF-8 bytes that the special tokens among ids are written with; they are no text."""
    specials = set(tokenizer.special_ids.values())
    return sum(len(tokenizer.decode([token]).encode()) for token in ids if token in specials)


def _ends(tokenizer: Tokenizer) -> list[int]:
    try:
        return [*tokenizer.ids_after, tokenizer.eod_id]
    except ConfigError:  # it has no such token
        return list(tokenizer.ids_after)

"""Encoding of prompts, continuations and documents, with one rule for the special tokens around texts.

A token before every text (`<s>`) begins a prompt and is never a target. A token after every text (`</s>`) ends a
document, so no prompt has it: the model would begin another document.

If the tokenizer adds nothing after texts, the splits equal lm-evaluation-harness's `hf` model; otherwise the
harness counts the `</s>` as part of the continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import Tokenizer


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the context of a text without one: the ids before every text, else end-of-document, else nothing."""
    try:
        return list(tokenizer.ids_before) or [tokenizer.eod_id]
    except ConfigError:  # it has no such token
        return []


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a prompt; for an empty text, `start_ids`.

    A text that already begins with the token before every text does not get it twice.
    """
    before, ids = list(tokenizer.ids_before), tokenizer.encode_bare(text)
    if before and ids[: len(before)] != before:
        ids = [*before, *ids]
    return ids or start_ids(tokenizer)


def encode_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Encodes a context with its continuation, and finds the start of the continuation.

    Both are encoded as one text, as in training. The continuation begins where the ids differ from the ids of the
    context alone: a token that spans both belongs to the continuation, and so do blanks at the end of the context,
    since byte-level tokenizers put a blank at the beginning of a word.

    Returns:
        the ids, and the index of the continuation's first one: their number if it has none, and 0 only if the
        tokenizer has no start token (`start_ids`).
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
    """Returns the ids of a text without ids around it, as `strip_special_tokens` of the document in a token file."""
    return strip_special_tokens(tokenizer, tokenizer.encode_bare(text))


def strip_special_tokens(tokenizer: Tokenizer, document: Sequence[int]) -> list[int]:
    """Removes the ids before every text and all end tokens from a document."""
    before, ends = list(tokenizer.ids_before), set(_ends(tokenizer))
    ids = list(document)
    if before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    while ids and ids[-1] in ends:
        ids.pop()
    return ids


def special_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns the UTF-8 bytes of the special tokens among ids, which are not text."""
    specials = set(tokenizer.special_ids.values())
    return sum(len(tokenizer.decode([token]).encode()) for token in ids if token in specials)


def _ends(tokenizer: Tokenizer) -> list[int]:
    try:
        return [*tokenizer.ids_after, tokenizer.eod_id]
    except ConfigError:  # it has no such token
        return list(tokenizer.ids_after)

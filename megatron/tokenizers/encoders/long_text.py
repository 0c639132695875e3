"""Encoding of texts of many megabytes in chunks.

A `str` may take four times the bytes of its UTF-8 form, and the ids of a whole text as much again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_BYTES = 4 << 20
_SPACE_MARK = "\u2581"  # a space in SentencePiece
# Split patterns without lookbehind in which a space after non-white space always begins a new match: GPT-2's (in
# `ByteLevel`), and the ones in the tokenizer.json of Llama 3 and Qwen 2.
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS_SPLIT_BEFORE_SPACES = frozenset(
    _CONTRACTIONS_AND_WORDS + digits + _SIGNS_AND_SPACES for digits in (r"\p{N}{1,3}", r"\p{N}")
)


class LongText:
    """A text held as UTF-8, freed while it is consumed.

    Args:
        utf8: valid UTF-8; this object takes ownership.
    """

    def __init__(self, utf8: bytearray) -> None:
        self._utf8 = utf8

    def __len__(self) -> int:
        return len(self._utf8)

    def whole(self) -> str:
        """Returns the remaining text."""
        text = self._utf8.decode()
        self._utf8 = bytearray()
        return text

    def chunks(self, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[str]:
        """Yields the text, cut before spaces that follow non-white space."""
        while (cut := self._next_cut(chunk_bytes)) is not None:
            chunk = self._utf8[:cut].decode()
            del self._utf8[:cut]  # cheap: only the start moves, and memory is released now and then
            yield chunk
        yield self.whole()

    def _next_cut(self, position: int) -> int | None:
        while (position := self._utf8.find(b" ", position)) >= 0:
            before = self._utf8[max(0, position - 4) : position].decode(errors="ignore")[-1:]
            if before and not before.isspace() and before != _SPACE_MARK:
                return position
            position += 1
        return None


def encode_long(tokenizer: Any, text: LongText, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Encodes a long text; the ids equal `tokenizer.encode_flat` of the whole.

    If the ids of chunks are sure to be the ids of the whole (see `can_cut_before_spaces`), only the ids and one chunk
    are held in memory.

    Args:
        tokenizer: a `Tokenizer`.
        dtype: of the result.
    """
    if not tokenizer.can_cut_before_spaces:
        return np.asarray(tokenizer.encode_flat([text.whole()])[0].astype(dtype))
    ids = bytearray()  # grows in place, while an array would be copied
    chunks = text.chunks()
    ids += tokenizer.encode_flat([next(chunks)])[0].astype(dtype).data
    for chunk in chunks:
        ids += tokenizer.encode_rest(chunk).astype(dtype).data
    return np.frombuffer(ids, dtype)


def can_cut_before_spaces(reference: Any) -> bool:
    """Returns True if every space after non-white space is sure to separate the ids before and after it.

    This holds if the text is not normalized, the split is known to begin a new match at such a space, nothing is added
    at the ends, and no added token contains or strips a space.

    Args:
        reference: a `tokenizers.Tokenizer`.
    """
    if reference.normalizer is not None or reference.pre_tokenizer is None:
        return False
    added = reference.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or " " in token.content for token in added):
        return False
    if reference.encode("a", add_special_tokens=True).ids != reference.encode("a", add_special_tokens=False).ids:
        return False
    try:
        return _splits_at_spaces(json.loads(reference.pre_tokenizer.__getstate__()))
    except (AttributeError, ValueError, TypeError, KeyError):
        return False


def _splits_at_spaces(rule: dict[str, Any]) -> bool:
    if rule["type"] == "ByteLevel":
        return bool(rule["use_regex"]) and not rule["add_prefix_space"]
    if rule["type"] != "Sequence" or len(rule["pretokenizers"]) != 2:
        return False
    split, byte_level = rule["pretokenizers"]
    return (
        split["type"] == "Split"
        and split["pattern"].get("Regex") in _PATTERNS_SPLIT_BEFORE_SPACES
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and byte_level["type"] == "ByteLevel"
        and not byte_level["use_regex"]
        and not byte_level["add_prefix_space"]
    )

"""Encoding of rendered conversations; only the template's special tokens count as such.

The content of messages is guarded before rendering: a private-use character is inserted into each special token that it
spells, and at its ends if it could spell one together with its surroundings. After rendering, the remaining special
tokens are the template's; the private-use characters are removed and the text on either side is encoded separately.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron.errors import DataError, printable
from megatron.tokenizers.tokenizer import Tokenizer

_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD  # Supplementary Private Use Area-A


def private_characters(texts: Sequence[str], count: int) -> list[str]:
    """Returns private-use characters that none of the texts contains.

    Raises:
        DataError: the texts contain all of them.
    """
    usual = [chr(_FIRST_PRIVATE + offset) for offset in range(count)]
    if not any(character in text for text in texts for character in usual):
        return usual
    used = set().union(*texts)
    free = (chr(point) for point in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(point) not in used)
    unused = list(itertools.islice(free, count))
    if len(unused) < count:
        raise DataError("A conversation contains every private-use character, so it cannot be marked.")
    return unused


class SpecialTokens:
    """The special tokens of a tokenizer, and the encoding of texts that contain them.

    Attributes:
        ids: by the text of the tokens.
        pattern: matches any of them, the longest first.
        tails: ends of tokens, by their first letter; text that begins with one could complete a token.
        heads: beginnings of tokens, by their last letter; text that ends with one could begin a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: Mapping[str, int] = tokenizer.special_ids
        texts = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        parts = [(text[:cut], text[cut:]) for text in texts for cut in range(1, len(text))]
        self.tails = _grouped((tail[0], tail) for _, tail in parts)
        self.heads = _grouped((head[-1], head) for head, _ in parts)
        self._numbers = frozenset(self.ids.values())

    def split(self, text: str, cuts: Iterable[int]) -> Iterator[tuple[int, int, int | None]]:
        """Splits a rendered text at its special tokens and at given positions.

        Yields:
            start, end, and the id of a special token, or None for text to encode separately.
        """
        edges, position = sorted(cuts), 0
        for match in [*self.pattern.finditer(text), None]:
            first, last = (len(text), len(text)) if match is None else match.span()
            for edge in (*(edge for edge in edges if position < edge < first), first):
                if position < edge:
                    yield position, edge, None
                    position = edge
            if match is not None:
                yield first, last, self.ids[match[0]]
                position = last

    def first_after(self, text: str, position: int, last: int) -> tuple[int, int] | None:
        """Returns the range of the first special token in a part of a text."""
        match = self.pattern.search(text, position, last)
        return None if match is None else match.span()

    def end_at(self, text: str, position: int) -> int:
        """Returns the end of the special token at a position, or the position if there is none."""
        match = self.pattern.match(text, position)
        return position if match is None else match.end()

    def names(self) -> dict[str, str]:
        """Returns the texts of `bos_token` and `eos_token`, as this tokenizer encodes texts."""
        texts = {number: text for text, number in self.ids.items()}
        before = "".join(texts.get(number, "") for number in self.tokenizer.ids_before)
        return {"bos_token": before, "eos_token": texts[self.tokenizer.eod_id]}

    def encode(self, text: str, mark: str) -> list[int]:
        """Encodes text without special tokens, whatever it spells; marks are removed.

        Raises:
            DataError: the tokenizer produces a special token even for single letters.
        """
        whole = self.tokenizer.encode_bare(text.replace(mark, ""))
        if self._numbers.isdisjoint(whole):  # most tokenizers produce no special tokens for text
            return whole
        return [number for part in text.split(mark) if part for number in self._encode_part(part)]

    def _encode_part(self, text: str) -> list[int]:
        ids = self.tokenizer.encode_bare(text)
        if self._numbers.isdisjoint(ids):
            return ids
        ids = [number for letter in text for number in self.tokenizer.encode_bare(letter)]
        if not self._numbers.isdisjoint(ids):
            raise DataError(
                f"The tokenizer {self.tokenizer.name} encodes letters of {printable(text, 60)} as a special token, so "
                "a message could forge its end. Use another tokenizer."
            )
        return ids


class Guard:
    """Prevents the contents of one conversation from spelling special tokens."""

    def __init__(self, special: SpecialTokens, contents: Sequence[str]) -> None:
        self._special = special
        self.mark, begin, end = private_characters(contents, 3)
        self.generation_marks = begin, end

    def mark_tokens(self, content: str) -> str:
        """Inserts marks into the special tokens that a text spells, whole or in part at its ends."""
        guarded = self._special.pattern.sub(lambda match: match[0][:1] + self.mark + match[0][1:], content)
        core = guarded.strip()
        if not core:
            return guarded
        first = guarded.index(core)
        before, after = guarded[:first], guarded[first + len(core) :]
        if core.startswith(self._special.tails.get(core[0], ())):
            core = self.mark + core
        if core.endswith(self._special.heads.get(core[-1], ())):
            core = core + self.mark
        return before + core + after


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, dict[str, None]] = {}
    for key, value in pairs:
        groups.setdefault(key, {})[value] = None
    return {key: tuple(values) for key, values in groups.items()}

"""Text with special tokens in it, of which only those that a template wrote are meant as such.

What a message says is guarded before it is rendered: a private character is put into each special token that it spells,
and between it and its surroundings where the two could spell one together. After rendering, the special tokens that
are left are the template's own; the private characters are taken out and the text on either side of them is encoded
by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron.errors import DataError, printable
from megatron.tokenizers.tokenizer import Tokenizer

_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD  # a plane that Unicode leaves to private use


def private_characters(texts: Sequence[str], count: int) -> list[str]:
    """Some characters for private use that none of the texts contains.

    Raises:
        DataError: they contain all of them.
    """
    usual = [chr(_FIRST_PRIVATE + place) for place in range(count)]
    if not any(one in text for text in texts for one in usual):
        return usual
    used = set().union(*texts)
    free = (chr(point) for point in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(point) not in used)
    chosen = [one for one, _ in zip(free, range(count), strict=False)]
    if len(chosen) < count:
        raise DataError("A conversation contains every character for private use there is, so it cannot be marked.")
    return chosen


class SpecialTokens:
    """The special tokens of a tokenizer, and the encoding of texts that contain them.

    Attributes:
        ids: by what the tokens are written as.
        pattern: matches any of them, the longest first.
        tails: beginnings that could complete a token, by their first letter.
        heads: ends that could begin a token, by their last letter.
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

    def pieces(self, text: str, cuts: Iterable[int]) -> Iterator[tuple[int, int, int | None]]:
        """Divides a rendered text at its special tokens and at some places.

        Yields:
            Where a piece begins and ends, and its id: None if it is no special token, but text to be encoded by itself.
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
        """Where the first special token in a part of a text is."""
        match = self.pattern.search(text, position, last)
        return None if match is None else match.span()

    def end_at(self, text: str, position: int) -> int:
        """Where the special token that begins at a place ends; the place itself if none does."""
        match = self.pattern.match(text, position)
        return position if match is None else match.end()

    def names(self) -> dict[str, str]:
        """The texts of the tokens that templates call `bos_token` and `eos_token`, as this tokenizer writes texts."""
        texts = {number: text for text, number in self.ids.items()}
        before = "".join(texts.get(number, "") for number in self.tokenizer.ids_before)
        return {"bos_token": before, "eos_token": texts[self.tokenizer.eod_id]}

    def encode(self, text: str, mark: str) -> list[int]:
        """Ids of text that means no special token, whatever it spells; marks are taken out of it.

        Raises:
            DataError: the tokenizer makes a special token even of its letters one by one.
        """
        whole = self.tokenizer.encode_bare(text.replace(mark, ""))
        if self._numbers.isdisjoint(whole):  # as of most tokenizers, which make no special token of any text
            return whole
        return [number for part in text.split(mark) if part for number in self._encode_part(part)]

    def _encode_part(self, text: str) -> list[int]:
        ids = self.tokenizer.encode_bare(text)
        if self._numbers.isdisjoint(ids):
            return ids
        ids = [number for letter in text for number in self.tokenizer.encode_bare(letter)]
        if not self._numbers.isdisjoint(ids):
            raise DataError(
                f"The tokenizer {self.tokenizer.name} turns the letters of {printable(text, 60)} into a special token, "
                "so a message could end itself. Use another tokenizer."
            )
        return ids


class Guard:
    """Keeps the contents of one conversation from spelling special tokens.

    Args:
        special: the special tokens.
        contents: what is said in the conversation.
    """

    def __init__(self, special: SpecialTokens, contents: Sequence[str]) -> None:
        self._special = special
        self.mark, begin, end = private_characters(contents, 3)
        self.generation_marks = begin, end

    def applied(self, content: str) -> str:
        """A text with marks in the special tokens that it spells, whole or in part at its ends."""
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
